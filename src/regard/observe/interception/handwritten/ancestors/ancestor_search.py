"""Searches back through the operations that made a tensor: its ancestors, what was expanded, and what weights are of."""

import weakref
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.products.score_form import COPIES
from regard.observe.interception.provenance import LEARNED, ModuleFrame, Operation

MAX_STEPS = 12  # operations to search back for a pair
MAX_VISITED = 10_000  # tensors to visit
MAX_SCANNED = 1_000  # results of a module to search for all uses of a tensor
VIEWED = {  # functions whose results are views
    *("chunk", "split", "split_with_sizes", "unbind", "getitem", "select", "narrow"),
    *("view", "unflatten", "unsqueeze", "squeeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "T"),
}
CONVERSIONS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}  # to another dtype, in the same order
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ZEROS = {"zeros", "zeros_like", "new_zeros"}
ROW_REDUCTIONS = {"max", "amax", "logsumexp"}
EXPANDS = {"expand", "expand_as", "broadcast_to"}
REPEATS = EXPANDS | {"repeat", "repeat_interleave", "tile"}

TensorRef = weakref.ref[Tensor]  # to one that may have been freed
Sized = tuple[TensorRef, int]  # a tensor and its number of entries


def is_used_once(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether one operation in a running module, of at most MAX_SCANNED results, has a tensor among its arguments."""
    if len(frame.makers) > MAX_SCANNED:
        return False
    return sum(one is x for makers in frame.makers.values() for maker in makers for one in maker.given) == 1


def starts_as_zeros(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether a layer of the module made a tensor of zeros, as of the state of a decoder before its first step."""
    is_projected = False
    for _ in range(MAX_STEPS):
        makers = [maker for maker in frame.find_makers(x) if not (maker.given and maker.given[0] is x)]  # to() may return x
        if len(makers) != 1:
            return False
        if makers[0].name in ZEROS:
            return is_projected
        is_layer = is_end(makers[0]) and not is_projected
        if not makers[0].given or not (is_layer or strip_affixes(makers[0].name) in VIEWED | COPIES | EXPANDS):
            return False
        x, is_projected = makers[0].given[0], is_projected or is_layer
    return False


def is_expanded(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether a tensor has more entries than the tensor it was made from."""
    return any(max(maker.sizes, default=size) < size for maker in frame.find_makers(x))


def is_residual(frames: list[ModuleFrame], x: Tensor, result: Tensor) -> bool:
    """Return whether a tensor was made from x and has its shape, so that their sum is a residual connection.

    A bias of scores (b, h, q, k) that earlier layers shared is one of their ancestors too, but not within the running module.
    """
    inner_frames = frames[-1:] if result.dim() > 3 else frames
    return x.shape == result.shape and id(weakref.ref(x)) in find_ancestors(inner_frames, result)


def walk_back(
    frames: list[ModuleFrame], x: Sized | list[Sized], goes_on: Callable[[Operation, int, int], bool]
) -> Iterator[tuple[ModuleFrame, Sized, list[Operation]]]:
    """Generate the tensors that one or several were made from, with the operations that made each, innermost frames first.

    goes_on(maker, n, size) chooses the arguments of n entries by which the search goes on from a result of `size` entries.
    """
    queue, count = [*x] if isinstance(x, list) else [x], 0
    for frame in reversed(frames):
        outer_tensors = []
        visited = set[int]()
        while queue and count < MAX_VISITED:
            one, size = queue.pop()
            if id(one) in visited:
                continue
            visited.add(id(one))
            count += 1
            makers = frame.find_makers(one)
            yield frame, (one, size), makers
            if not makers:
                outer_tensors.append((one, size))
            for maker in makers:
                inputs = zip(maker.given, maker.sizes, strict=False)
                queue += [(other, n) for other, n in inputs if goes_on(maker, n, size)]
        queue = outer_tensors


def is_end(maker: Operation) -> bool:
    """Return whether an operation is a module, or a product, whose arguments are other tokens than its result."""
    return maker.child is not None or infer_role(maker.name) in (Role.PRODUCT, Role.CONVOLUTION)


def find_ancestors(frames: list[ModuleFrame], x: Tensor | TensorRef) -> set[int]:
    """Return the ids of all tensors that a tensor was made from, in the running frames, and of indices that picked entries."""
    ids, starts = set[int](), [(weakref.ref(x) if isinstance(x, Tensor) else x, 0)]
    while starts:
        ids |= {id(one) for one, _ in starts}
        indices = list[Sized]()
        for _, (one, _), makers in walk_back(frames, starts, lambda *_: True):
            ids.add(id(one))
            for maker in makers:
                if maker.lookup is not None and len(maker.given) == 1:  # several indices, which are not among its arguments
                    indices += [(index, 0) for index in maker.lookup]
        starts = [one for one in indices if id(one[0]) not in ids]
    return ids


def has_tokens(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether a tensor was computed from the module's inputs, or by a product of parameters."""
    if isinstance(x, nn.Parameter):
        return False
    return frame.find_contents(weakref.ref(x)) >= LEARNED
