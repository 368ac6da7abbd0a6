"""Searches back through the operations that made a tensor: for pairs of tokens, and for values chosen by their own weights."""

import weakref
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.score_form import COPIES
from regard.observe.interception.lookups import MASKS
from regard.observe.interception.provenance import GATHERS, JOINS, LEARNED, TOKEN, ModuleFrame, Operation, TensorOrRef
from regard.observe.interception.thread_state import choose_by_numbers

MAX_STEPS = 12  # operations to search back for a pair
MAX_VISITED = 10_000  # tensors to visit
MAX_SCANNED = 1_000  # results of a module to search for all uses of a tensor
MAX_JOINS = 3  # within each other, in a feature map
CHOOSES = ("topk", "sort", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin")  # values and their indices
VIEWED = {  # functions whose results are views
    *("chunk", "split", "split_with_sizes", "unbind", "getitem", "select", "narrow"),
    *("view", "unflatten", "unsqueeze", "squeeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "T"),
}
CONVERSIONS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}  # to another dtype, in the same order
NORMS = {"normalize", "layer_norm", "rms_norm"}
NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
ZEROS = {"zeros", "zeros_like", "new_zeros"}
ROW_REDUCTIONS = {"max", "amax", "logsumexp"}
EXPANDS = {"expand", "expand_as", "broadcast_to"}
REPEATS = EXPANDS | {"repeat", "repeat_interleave", "tile"}

TensorRef = weakref.ref[Tensor]  # to one that may have been freed
Sized = tuple[TensorRef, int]  # a tensor and its number of entries


Pair = tuple[TensorOrRef, TensorOrRef]


def find_pair(frame: ModuleFrame, x: Tensor, over_last: bool) -> Pair | None:
    """Return two tensors if the entries of x belong to pairs of their tokens, so that a sum over some is a score; else None.

    That is so where the two were broadcast against each other, or were multiplied or subtracted entry by entry and the sum is
    over the last axis.
    """
    meeting = find_meeting(frame, weakref.ref(x), x.numel())
    if meeting is None:
        return None
    maker, tokens, size = meeting
    last = x.shape[-1] if over_last and x.dim() else 0
    if not is_pairing(frame, maker, tokens, size, last):
        tokens = find_terms(frame, maker) if infer_role(maker.name) is Role.ADD else []
        tokens = [one for one in tokens if frame.find_contents(one[0]) == TOKEN]
        if len({id(one) for one, _ in tokens}) < 2 or not is_pairing(frame, maker, tokens, size, last):
            return None
    first, second, *_ = {id(one): one for one, _ in tokens}.values()
    return first, second


def find_terms(frame: ModuleFrame, maker: Operation, depth: int = MAX_STEPS) -> list[Sized]:
    """Return the tensors of tokens that an addition adds up, those of sums that it alone uses among them, with their entries.

    A sum that other operations use too is a residual stream, to which others were added.
    """
    terms = []
    for one, size in find_token_inputs(frame, maker):
        makers = frame.find_makers(one)
        is_sum = len(makers) == 1 and not makers[0].child and infer_role(makers[0].name) is Role.ADD
        terms += find_terms(frame, makers[0], depth - 1) if is_sum and depth and is_used_once(frame, one) else [(one, size)]
    return terms


def is_used_once(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether one operation in a running module, of at most MAX_SCANNED results, has a tensor among its arguments."""
    if len(frame.makers) > MAX_SCANNED:
        return False
    return sum(one is x for makers in frame.makers.values() for maker in makers for one in maker.given) == 1


def is_broadcast_pair(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether x was made from tokens that were broadcast against each other, or added where one was before.

    `size` is the number of entries of x.
    """
    meeting = find_meeting(frame, x, size)
    if meeting is None:
        return False
    maker, tokens, size = meeting
    role, is_broadcast = infer_role(maker.name), size > max(n for _, n in tokens)
    was_broadcast = role is Role.ADD and any(is_repeated(frame, *one) for one in tokens)
    return (was_broadcast or (is_broadcast and role in (Role.ADD, Role.MULTIPLY))) and are_all_tokens(frame, tokens)


def is_sum_of_broadcast(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether x was made of a sum or difference of tokens of which one was broadcast, with others added to it or not.

    `size` is the number of entries of x. An index may have picked some of the sums before others were added.
    """
    meeting = find_meeting(frame, x, size)
    if meeting is None:
        return False
    for one in ([meeting[0]], *(frame.find_makers(one) for one, _ in meeting[1])):
        makers = frame.find_makers(one[-1].given[0]) if one and one[-1].name in GATHERS else one
        tokens = find_token_inputs(frame, makers[-1]) if makers and infer_role(makers[-1].name) is Role.ADD else []
        if len(tokens) > 1 and min(n for _, n in tokens) < size and are_all_tokens(frame, tokens):
            return infer_role(meeting[0].name) is Role.ADD
    return False


def find_meeting(
    frame: ModuleFrame, ref: TensorRef, size: int, passes_sums: bool = False
) -> tuple[Operation, list[Sized], int] | None:
    """Return the last operation that a tensor was made by from two tensors of tokens, with these and the entries of its result.

    `size` is the number of entries of the tensor. The search ends at a product or a sum unless it passes these.
    """
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(ref)
        if not makers:
            return None
        tokens = find_token_inputs(frame, makers[-1])
        if len({id(one) for one, _ in tokens}) > 1:
            return makers[-1], tokens, size
        core = strip_affixes(makers[-1].name)
        is_sum = core != "cumsum" and infer_role(core) in (Role.PRODUCT, Role.SUM)
        if len(tokens) != 1 or (is_sum and not passes_sums):
            return None
        ref, size = tokens[0]
    return None


def multiplies_copies(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether x is the outer product of two tensors along its last axes, of which one was repeated before.

    So it is where keys are expanded, copied and multiplied with values in place.
    """
    makers = frame.find_makers(weakref.ref(x))
    tokens = find_token_inputs(frame, makers[-1]) if makers and infer_role(makers[-1].name) is Role.MULTIPLY else []
    sizes = [count_before_repeats(frame, *one) for one in tokens]
    return len(sizes) == 2 and max(sizes) < x.numel() and sizes[0] * sizes[1] == x.numel() * x.shape[:-2].numel()


def count_before_repeats(frame: ModuleFrame, x: TensorRef, size: int) -> int:
    """Return the entries of a tensor of this size before it was repeated and copied, if it was."""
    for _ in range(MAX_STEPS):
        maker = next(iter(frame.find_makers(x)), None)  # the first: a copy may have been written into
        core = "" if maker is None else strip_affixes(maker.name)
        if maker is not None and core in REPEATS:
            return maker.sizes[0]
        if maker is None or core not in COPIES:
            return size
        x = maker.given[0]
    return size


def find_token_inputs(frame: ModuleFrame, maker: Operation) -> list[Sized]:
    """Return the arguments of an operation that hold tokens, with their numbers of entries.

    Not an index that picks entries, nor the largest of what it is subtracted from.
    """
    inputs = list(zip(maker.given, maker.sizes, strict=False))[: 1 if maker.name in GATHERS else None]
    if len(inputs) == 2 and infer_role(maker.name) is Role.ADD and is_largest(frame, inputs[1][0], inputs[0][0]):
        del inputs[1]
    return [(one, size) for one, size in inputs if frame.find_contents(one) >= LEARNED]


def is_largest(frame: ModuleFrame, x: TensorRef, of: TensorRef) -> bool:
    """Return whether a tensor is the largest entries of another one along an axis, or the logarithm of the sum of all."""
    has_reduced = False
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(x)
        core = strip_affixes(makers[-1].name) if makers else ""
        if x is of or core not in VIEWED | COPIES | ROW_REDUCTIONS:
            break
        has_reduced |= core in ROW_REDUCTIONS
        x = makers[-1].given[0]
    return has_reduced and x is of


def is_pairing(frame: ModuleFrame, maker: Operation, tokens: list[Sized], size: int, last: int) -> bool:
    """Return whether an operation formed pairs of tokens: `size` entries, with `last` features each."""
    sizes = [one for _, one in tokens]
    if maker.name in JOINS:
        are_expanded = [is_expanded(frame, *one) for one in tokens]
        return (
            sum(are_expanded) > 1
            or are_of_edges(frame, tokens, size // max(last, 1))
            or (any(are_expanded) and are_all_tokens(frame, tokens))  # one query beside all keys of its row
        )
    if size > max(sizes):
        return True
    role = infer_role(maker.name)
    if role is Role.MULTIPLY:
        return last > 0 and min(sizes) >= last and not min(sizes) % last
    if role is Role.ADD and (min(sizes) < size or any(is_expanded(frame, *one) for one in tokens)):
        # one query for all keys of its row: additive attention
        return last > 0 and not min(sizes) % last and are_all_tokens(frame, tokens)
    return last > 0 and strip_affixes(maker.name) == "sub" and min(sizes) == size


def are_of_edges(frame: ModuleFrame, tokens: list[Sized], rows: int) -> bool:
    """Return whether two tensors were picked from tokens by indices of this many rows, the senders and receivers of edges."""
    makers = [frame.find_makers(one)[-1:] for one, _ in tokens]
    lookups = [maker.lookup for one in makers for maker in one if maker.lookup and frame.find_contents(maker.given[0]) == TOKEN]
    is_pair = len(lookups) == len(tokens) == 2 and lookups[0].key != lookups[1].key
    return is_pair and all(one.indices[0].numel() == rows and one.indices[0].dtype not in MASKS for one in lookups)


def are_all_tokens(frame: ModuleFrame, tokens: list[Sized]) -> bool:
    """Return whether all tensors were computed from the module's inputs, none by weights alone but of a state that is zeros."""
    others = [one for one, _ in tokens if frame.find_contents(one) != TOKEN]
    return len(others) < len(tokens) and all(starts_as_zeros(frame, one) for one in others)


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


def is_repeated(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether a tensor was expanded by broadcasting or by picking, and not by a layer that has more features."""
    return any(max(maker.sizes, default=size) < size and repeats(maker) for maker in frame.find_makers(x))


def repeats(maker: Operation) -> bool:
    """Return whether an operation makes a larger result of entries that it broadcasts or picks."""
    is_by_entry = infer_role(maker.name) in (Role.ADD, Role.MULTIPLY)
    return not maker.child and (is_by_entry or maker.name in GATHERS or strip_affixes(maker.name) in REPEATS)


def is_routed(frames: list[ModuleFrame], weights: Tensor, values: Tensor) -> bool:
    """Return whether values were chosen or made with the scores of their own weights, as a router's experts are."""
    return bool(find_scores(frames, weights) & find_ancestors(frames, values))


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


def find_scores(frames: list[ModuleFrame], weights: Tensor) -> set[int]:
    """Return the ids of the tensors that weights were made from.

    The search goes back to the output of a module or of a product, and includes all results of modules and of selections, as
    topk's. Where one of these ran in a module, what else the module was called with is a mask, which other layers may share.
    """

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        return n <= size and not is_end(maker)  # a larger tensor also holds something else

    ids, arguments, has_end, inner = set[int](), set[int](), False, frames[-1]
    for frame, (one, _), makers in walk_back(frames, (weakref.ref(weights), weights.numel()), goes_on):
        if has_end and frame is not inner:
            break
        (ids if makers else arguments).add(id(one))
        has_end, inner = has_end or any(map(is_end, makers)), frame
        for maker in makers:
            if maker.child or maker.name in CHOOSES:
                ids |= {id(other) for other in maker.results}
    return ids if has_end else ids | arguments


def find_ancestors(frames: list[ModuleFrame], x: Tensor) -> set[int]:
    """Return the ids of all tensors that a tensor was made from, in the running frames, and of indices that picked entries."""
    ids, starts = set[int](), [(weakref.ref(x), 0)]
    while starts:
        ids |= {id(one) for one, _ in starts}
        indices = list[Sized]()
        for _, (one, _), makers in walk_back(frames, starts, lambda *_: True):
            ids.add(id(one))
            for maker in makers:
                if maker.lookup is not None and len(maker.given) == 1:  # several indices, which are not among its arguments
                    indices += [(index, 0) for index in maker.lookup.given]
        starts = [one for one in indices if id(one[0]) not in ids]
    return ids


def is_feature_map(frames: list[ModuleFrame], x: Sized, max_joins: int = MAX_JOINS, whole: TensorRef | None = None) -> bool:
    """Return whether a nonlinear function or a softmax made x, up to layouts, factors, sums and joins of feature maps alone.

    What another module has made counts if it is at least 0 and no mask. The model's own arguments, as the adjacency matrix of a
    graph, do not. `whole` is a tensor that x was joined to.
    """

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        is_larger = n >= size or strip_affixes(maker.name) in REPEATS  # a smaller tensor is a norm or a factor
        return is_larger and maker.name not in JOINS and not is_end(maker)

    whole = x[0] if whole is None else whole
    for frame, (one, _), makers in walk_back(frames, x, goes_on):
        if any(infer_role(maker.name) in (Role.NONLINEAR, Role.POWER, Role.SOFTMAX) for maker in makers):
            return True
        tensor = next((y for ref in (one, x[0], whole) if (y := ref()) is not None), None)
        if any(maker.child for maker in makers) and tensor is not None and has_features(tensor):
            return True
        for maker in makers:
            parts = find_token_inputs(frame, maker) if maker.name in JOINS else []
            if parts and max_joins and all(is_feature_map(frames, part, max_joins - 1, whole) for part in parts):
                return True
            if any(multiplies_itself(frame, part) for part in parts):
                return True  # a polynomial, whose lower powers are joined with it
    return False


def multiplies_itself(frame: ModuleFrame, x: Sized) -> bool:
    """Return whether a tensor is the products of the features of another one with each other, up to layouts and factors."""
    one, size = x
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(one)
        if not makers or not makers[-1].given:
            return False
        given, sizes = makers[-1].given, makers[-1].sizes
        if len(given) == 2 and given[0] is given[1]:
            return size > sizes[0]
        if is_end(makers[-1]):
            return False
        size = max(sizes)
        one = given[sizes.index(size)]
    return False


def has_fewer_rows(frames: list[ModuleFrame], x: Tensor, rows: int) -> bool:
    """Return whether a module or a product made x of fewer rows of features than these, as a hypernetwork makes weights."""

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        return n >= size and (not is_end(maker) or is_activation(maker))

    for frame, _, makers in walk_back(frames, (weakref.ref(x), x.numel()), goes_on):
        for maker in makers:
            if is_end(maker) and not is_activation(maker):
                counts = [count_rows(one(), size, x.numel() // rows) for one, size in find_token_inputs(frame, maker)]
                if counts and max(counts) < rows:
                    return True
    return False


def is_activation(maker: Operation) -> bool:
    """Return whether an operation is a module that computes a nonlinear function of each entry."""
    return maker.child is not None and bool(maker.name)


def is_norm(maker: Operation) -> bool:
    """Return whether an operation divides the features of each token by their size."""
    return maker.name in NORMS or (maker.child is not None and issubclass(maker.child, NORM_LAYERS))


def count_rows(x: Tensor | None, size: int, width: int) -> int:
    """Return the number of rows of features in a tensor, tokens last or first; of one that was freed, by half a width."""
    if x is None:
        return 2 * size // width
    if not x.is_floating_point() or not x.dim():
        return size
    features = {x.shape[-1], x.shape[1] if x.dim() > 2 and x.shape[1] > 1 else x.shape[-1]}
    return size // min(features) if size else 0


def has_features(x: Tensor) -> bool:
    """Return whether all numbers are at least 0, and some are neither 0 nor 1."""
    return x.is_floating_point() and choose_by_numbers(bool((x >= 0).all()) and not bool(((x == 0) | (x == 1)).all()))


def has_tokens(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether a tensor was computed from the module's inputs, or by a product of parameters."""
    if isinstance(x, nn.Parameter):
        return False
    return frame.find_contents(weakref.ref(x)) >= LEARNED
