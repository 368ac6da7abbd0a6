"""Whether a sum over dimensions of a tensor that a layer has made is over tokens, by the inputs of the modules that run."""

import math

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.projections import find_projection, has_features_last
from regard.observe.interception.handwritten.products.labelled_product import Labels
from regard.observe.interception.provenance import ModuleFrame


def are_token_labels(
    frames: list[ModuleFrame], x: TensorRef, layout: Tensor, labels: Labels, keys: Labels, is_running: bool
) -> bool | None:
    """Return whether labels of keys are of the tokens of what a layer has made, of which x is made; None if no layer is known.

    `layout` is x, or has its strides if it was freed, with these labels: batch, tokens and features lie in memory as the layer
    wrote them. Running sums may be over the first axis, and others if a module states that no batch is first.
    """
    projection = find_projection(frames, x, layout.stride())
    is_last = None if projection is None else has_features_last(projection)
    own = [*zip(labels, layout.stride() if projection is None else projection.strides, layout.shape, strict=True)]
    summed = {stride: size for label, stride, size in own if label in keys and size > 1}
    kept = {stride: size for label, stride, size in own if label not in keys and size > 1}
    if is_last is None or not kept or not summed:
        return None
    before = math.prod(size for stride, size in kept.items() if stride > max(summed))
    after = math.prod(size for stride, size in kept.items() if stride < min(summed))
    if before * after != math.prod(kept.values()):
        return False
    inputs = [one for frame in frames for one in frame.input_tensors]
    are_first = is_running or any(getattr(frame.module, "batch_first", None) is False for frame in frames)
    sizes = [list_spatial_sizes(one, are_first) for one in inputs]
    return any(has_axes(one, is_last, before, math.prod(summed.values()), after) for one in sizes)


def list_spatial_sizes(x: Tensor, are_first: bool) -> list[tuple[int, list[int]]]:
    """Return the sizes of batch and of axes of tokens that an input (b, ..., c), (b, c, ...) or ids (b, t) may have.

    Tokens may be the first axis, as in (t, b, c), where nothing sums over a batch: `are_first`.
    """
    if x.dim() == 2 and not x.is_floating_point():
        return [(x.shape[0], [x.shape[1]])]
    first = [(1, [x.shape[0]])] if are_first and x.dim() == 3 else []
    return [(x.shape[0], [*x.shape[1:-1]]), (x.shape[0], [*x.shape[2:]]), *first] if x.dim() > 2 else []


def has_axes(inputs: list[tuple[int, list[int]]], is_last: bool, before: int, entries: int, after: int) -> bool:
    """Return whether an axis of tokens, or all of them, has a number of entries, with as many others before and after them.

    Features are kept, behind the tokens if they are last.
    """
    for batch, sizes in inputs:
        for start, end in {(0, len(sizes)), *((n, n + 1) for n in range(len(sizes)))}:
            outer, inner = batch * math.prod(sizes[:start]), math.prod(sizes[end:])
            fits = before == outer and after > inner if is_last else before > outer and not before % outer and after == inner
            if fits and entries == math.prod(sizes[start:end]):
                return True
    return False
