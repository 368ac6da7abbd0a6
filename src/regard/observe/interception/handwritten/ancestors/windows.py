"""Values that are windows of tokens, or tokens sampled at places: each query has values of its own."""

import weakref
from typing import NamedTuple

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, Sized, TensorRef, is_end, walk_back
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.ancestors.projections import Projection, has_features_last
from regard.observe.interception.handwritten.products.score_form import PERMUTES, SAME, VIEWS
from regard.observe.interception.lookups import MASKS, Lookup
from regard.observe.interception.provenance import JOINS, TOKEN, ModuleFrame, Operation

CONVOLUTION, SAMPLING = "dynamic convolution", "deformable attention"
MAX_JOINS = 3  # within each other
WINDOWS = {  # functions whose results may have a token several times, and what weighs these
    "unfold": CONVOLUTION,
    "as_strided": CONVOLUTION,
    "grid_sample": SAMPLING,
}
TOKEN_CUTS = {"getitem", "narrow", "select"}
TOKEN_MOVES = TOKEN_CUTS | {"roll", "pad", "constant_pad_nd"}
MAX_PRODUCTS = 8  # of a sum, to look at
PADDING = nn.ZeroPad2d.__module__  # of the modules that pad


def reads_windows(frames: list[ModuleFrame], weights: Tensor, values: Tensor, extent: int) -> bool:
    """Return whether each token predicts rows of weights, `extent` long, for a window of tokens, or for some sampled at places.

    Rows then share tokens, each in values of its own.
    """
    rows = weights.numel() // extent if extent else 0
    if not is_row_for_each_token(frames, rows) or frames[-1].find_contents(weakref.ref(weights)) != TOKEN:
        return False
    return bool(name_windows(frames, weights, values, extent))


def is_row_for_each_token(frames: list[ModuleFrame], rows: int) -> bool:
    """Return whether rows of weights may be some for each token of an input."""
    return any(not rows % (samples * tokens) for samples, tokens in count_tokens_of_inputs(frames))


def count_tokens_of_inputs(frames: list[ModuleFrame]) -> list[tuple[int, int]]:
    """Return the numbers of samples, and of tokens of each, that inputs (b, ..., c), (b, c, ...) or ids (b, t) may have.

    Those of inputs (t, c) count if there are no others: each row may be a sample. Unlike the axes along which products may be
    summed, those of a single token do not: any number of rows is a multiple of it.
    """
    inputs = [x for frame in frames for x in frame.input_tensors if x.numel()]
    counts = [(x.shape[0], x.shape[1]) for x in inputs if x.dim() == 2 and not x.is_floating_point()]
    for x in inputs:
        tokens = (x.shape[1:-1].numel(), x.shape[2:].numel()) if x.dim() > 2 else ()
        counts += [(x.shape[0], count) for count in tokens if count > 1]
    return counts or [(1, x.shape[0]) for x in inputs if x.dim() == 2]


def name_windows(frames: list[ModuleFrame], weights: Tensor, values: Tensor, extent: int) -> str:
    """Return what weighs values that are windows of `extent` tokens, or tokens sampled at places; nothing for other values.

    Another module may have gathered them if products of queries and keys made the weights.
    """
    x, picks = (weakref.ref(values), values.numel()), set[int]()
    if not multiplies_tokens(frames[-1], weights):
        frames, picks = frames[-1:], {tokens * extent for _, tokens in count_tokens_of_inputs(frames)}
    for frame in reversed(frames):
        parts = list_joined(frame, x)
        if len(parts) == extent and are_moved_copies(frame, parts):
            return CONVOLUTION
        x = parts[0]
        if len(parts) > 1 or find_maker(frame, x[0]) is not None:  # else an argument of the module
            names = {name_part(frame, part, len(parts) > 1, picks) for part in parts}
            return names.pop() if len(names) == 1 else ""
    return ""


def list_joined(frame: ModuleFrame, x: Sized, max_joins: int = MAX_JOINS) -> list[Sized]:
    """Return the tensors of tokens that were joined to x, or written into it, with their numbers of entries; x if none were."""
    for _ in range(MAX_STEPS if max_joins else 0):
        makers = frame.find_makers(x[0])
        parts = [one for maker in makers if maker.name in JOINS for one in zip(maker.given, maker.sizes, strict=True)]
        written = [(maker.given[-1], maker.sizes[-1]) for maker in makers if maker.name == "__setitem__"]
        parts += written if len(written) > 1 else []  # not a mask
        parts = [one for one in parts if one[0] is not x[0] and frame.find_contents(one[0]) == TOKEN]
        if parts:
            return [one for part in parts for one in list_joined(frame, part, max_joins - 1)]
        maker = find_maker(frame, x[0])
        if maker is None or not is_layout(maker):
            break
        x = maker.given[0], maker.sizes[0]
    return [x]


def find_maker(frame: ModuleFrame, x: TensorRef) -> Operation | None:
    """Return the last operation that made a tensor of another one; None for an argument of the module."""
    makers = [one for one in frame.find_makers(x) if one.given and one.given[0] is not x]  # flatten() may return x
    return makers[-1] if makers else None


def strip_maker(maker: Operation) -> str:
    """Return the name of the function that an operation is, or that a module of torch for windows or padding calls."""
    if maker.child is None:
        return strip_affixes(maker.name)
    return "unfold" if issubclass(maker.child, nn.Unfold) else "pad" if maker.child.__module__ == PADDING else ""


def name_part(frame: ModuleFrame, part: Sized, is_joined: bool, picks: set[int]) -> str:
    """Return what weighs windows that one function made, or samples; nothing for other values, joined with others or not.

    `picks` are the numbers of tokens that all windows of a sample may have; any number if it is empty.
    """
    x, size = part
    for _ in range(MAX_STEPS):
        maker = find_maker(frame, x)
        core = "" if maker is None else strip_maker(maker)
        if maker is None or ((core in WINDOWS or maker.lookup is not None) and is_over_features(frame, maker)):
            break
        if core in WINDOWS:
            return WINDOWS[core] if core == "grid_sample" or maker.sizes[0] < size else ""
        if maker.lookup is not None:
            may_be_windows = not (is_joined or (picks and maker.lookup.count_picks() not in picks))
            return name_lookup(frame, maker, maker.lookup, size, may_be_windows)
        if not (is_layout(maker) or core in TOKEN_CUTS):
            break
        x, size = maker.given[0], min(size, maker.sizes[0])
    return ""


def name_lookup(frame: ModuleFrame, maker: Operation, lookup: Lookup, size: int, may_be_windows: bool) -> str:
    """Return what weighs `size` entries of tokens that an operation looked up; nothing if they are neither windows nor samples.

    Windows have more entries than the tokens. Samples are of places that the module computed from tokens.
    """
    if frame.find_contents(maker.given[0]) != TOKEN or lookup.indices[0].dtype in MASKS:
        return ""
    if any(frame.find_contents(one) == TOKEN and frame.find_makers(one) for one in lookup.given):
        return SAMPLING if maker.sizes[0] != size or lookup.has_repeats() else ""  # tokens in another order
    return CONVOLUTION if may_be_windows and count_distinct(frame, maker.given[0], maker.sizes[0]) < size else ""


def count_distinct(frame: ModuleFrame, x: TensorRef, size: int) -> int:
    """Return the entries of a tensor of this size before it was repeated, if it was."""
    for _ in range(MAX_STEPS):
        maker = find_maker(frame, x)
        if maker is None or not is_layout(maker):
            break
        x, size = maker.given[0], min(size, maker.sizes[0])
    return size


class Origin(NamedTuple):
    """A tensor that another one is a copy of, its number of entries, and whether entries were moved on the way."""

    tensor: TensorRef
    size: int
    is_moved: bool


def list_origins(frame: ModuleFrame, x: Sized) -> list[Origin]:
    """Return x and the tensors that it is a copy of, in another layout, cut, padded or rolled along tokens, nearest first."""
    origins = [Origin(*x, False)]
    for _ in range(MAX_STEPS):
        maker = find_maker(frame, origins[-1].tensor)
        core = "" if maker is None else strip_maker(maker)
        moves = core in TOKEN_MOVES
        if maker is None or not (moves or {core, maker.name} & (VIEWS | PERMUTES | SAME)):
            break
        if maker.lookup is not None or (moves and is_over_features(frame, maker)):
            break
        origins.append(Origin(maker.given[0], maker.sizes[0], origins[-1].is_moved or moves))
    return origins


def are_moved_copies(frame: ModuleFrame, parts: list[Sized]) -> bool:
    """Return whether tensors are copies of one tensor of tokens, some of them moved, with more entries together than it has.

    Two are not enough: a softmax over two is a gate.
    """
    origins = [list_origins(frame, part) for part in parts] if len(parts) > 2 else []
    shared = set.intersection(*({id(one.tensor) for one in chain} for chain in origins)) if origins else set[int]()
    found = [one for chain in origins for one in chain if id(one.tensor) in shared]
    if not found or frame.find_contents(found[0].tensor) != TOKEN:
        return False
    is_moved = any(one.is_moved for one in found if one.tensor is found[0].tensor)
    return is_moved and sum(size for _, size in parts) > found[0].size


def weighs_copies(frames: list[ModuleFrame], tensors: list[Tensor]) -> bool:
    """Return whether tensors are sums of products of weights, one for each token, with copies of the same tokens, moved.

    So a loop over the places of a window adds up what these hold.
    """
    frame, products = frames[-1], list[Operation]()
    for x in tensors:
        for *_, makers in walk_back([frame], (weakref.ref(x), 0), lambda maker, *_: is_layout(maker) or adds(maker)):
            products += [one for one in makers if infer_role(one.name) is Role.MULTIPLY and len(one.given) > 1]
            if len(products) >= MAX_PRODUCTS:
                break
    by_size = [sorted(zip(one.sizes[-2:], one.given[-2:], strict=True), key=lambda pair: pair[0]) for one in products]
    copies = [(x, size) for (less, _), (size, x) in by_size if less < size]
    if len(copies) < len(products) or not all(
        is_row_for_each_token(frames, less) and frame.find_contents(column) == TOKEN for (less, column), _ in by_size
    ):
        return False
    return are_moved_copies(frame, copies)


def adds(maker: Operation) -> bool:
    """Return whether an operation adds or joins tensors."""
    is_sum = infer_role(maker.name) is Role.ADD or strip_affixes(maker.name) == "addcmul"
    return maker.child is None and (is_sum or maker.name in JOINS)


def is_over_features(frame: ModuleFrame, windows: Operation) -> bool:
    """Return whether windows are over the last axis of what a layer has made, or reads, with its features there."""
    x, dim = windows.given[0], windows.dim if windows.lookup is None else windows.lookup.dim
    for _ in range(MAX_STEPS if dim == -1 else 0):
        maker = next(reversed(frame.find_makers(x)), None)
        if maker is None:
            readers = [one for one in frame.list_operations() if any(given is x for given in one.given)]
            return any(is_end(one) and has_features_last(Projection(x, one, frame)) for one in readers)
        if is_end(maker):
            return bool(has_features_last(Projection(x, maker, frame)))
        if not maker.given or is_layout(maker):
            break
        x = maker.given[maker.sizes.index(max(maker.sizes))]
    return False


def multiplies_tokens(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether sums of products of two tensors of tokens, as of queries and keys, made x, behind the last layer."""
    for *_, makers in walk_back([frame], (weakref.ref(x), 0), lambda maker, *_: not is_end(maker)):
        for maker in makers:
            products = [maker] if infer_role(maker.name) is Role.PRODUCT else []
            if infer_role(maker.name) is Role.SUM and maker.given:
                products = [one for one in frame.find_makers(maker.given[0]) if infer_role(one.name) is Role.MULTIPLY]
            for one in products:
                if len({id(given) for given in one.given if frame.find_contents(given) == TOKEN}) > 1:
                    return True
    return False
