"""Values that are windows of tokens, or tokens sampled at places: each query has values of its own."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestor_search import (
    MAX_STEPS,
    Projection,
    has_features_last,
    is_end,
    walk_back,
)
from regard.observe.interception.handwritten.edge_softmax import is_layout
from regard.observe.interception.provenance import JOINS, TOKEN, ModuleFrame, Operation

WINDOWS = {  # functions whose results may have a token several times, and what weighs these
    "unfold": "dynamic convolution",
    "as_strided": "dynamic convolution",
    "grid_sample": "deformable attention",
}


def reads_windows(frames: list[ModuleFrame], weights: Tensor, values: Tensor, extent: int) -> bool:
    """Return whether each token predicts rows of weights, `extent` long, for a window of tokens, or for some sampled at places.

    Rows then share tokens, each in values of its own.
    """
    if frames[-1].find_contents(weakref.ref(weights)) != TOKEN or not name_windows(frames[-1], values):
        return False
    rows = weights.numel() // extent if extent else 0
    return any(not rows % count for count in count_tokens_of_inputs(frames))


def count_tokens_of_inputs(frames: list[ModuleFrame]) -> list[int]:
    """Return the numbers of tokens, of all samples, that inputs (b, ..., c), (b, c, ...) or ids (b, t) may have.

    Those of inputs (t, c) count if there are no others: each row may be a sample. Unlike the axes along which products may be
    summed, those of a single token do not: any number of rows is a multiple of it.
    """
    inputs = [x for frame in frames for x in frame.input_tensors if not x.is_nested and x.numel()]
    counts = [x.numel() for x in inputs if x.dim() == 2 and not x.is_floating_point()]
    for x in inputs:
        tokens = (x.shape[1:-1].numel(), x.shape[2:].numel()) if x.dim() > 2 else ()
        counts += [x.shape[0] * count for count in tokens if count > 1]
    return counts or [x.shape[0] for x in inputs if x.dim() == 2]


def name_windows(frame: ModuleFrame, values: Tensor) -> str:
    """Return what weighs values that are windows of tokens, or tokens sampled at places; nothing for other values."""
    x, size = weakref.ref(values), values.numel()
    for _ in range(MAX_STEPS):
        makers = [one for one in frame.find_makers(x) if not (one.given and one.given[0] is x)]  # flatten() may return x
        maker = makers[-1] if makers else None
        if maker is None or maker.child is not None or not maker.given:
            break
        core = strip_affixes(maker.name)
        if core in WINDOWS and is_over_features(frame, maker):
            break
        if core in WINDOWS:
            return WINDOWS[core] if core == "grid_sample" or maker.sizes[0] < size else ""
        if not (is_layout(maker) or maker.name in JOINS):
            break
        x, size = maker.given[0], maker.sizes[0]
    return ""


def is_over_features(frame: ModuleFrame, windows: Operation) -> bool:
    """Return whether windows are over the last axis of what a layer has made, or reads, with its features there."""
    x = windows.given[0]
    for _ in range(MAX_STEPS if windows.dim == -1 else 0):
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
