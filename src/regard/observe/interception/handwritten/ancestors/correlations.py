"""Correlations of queries with keys at each delay, computed by Fourier transforms along the tokens, as Autoformer's.

https://arxiv.org/abs/2106.13008
"""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, TensorRef
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.ancestors.row_provenance import RowSearch
from regard.observe.interception.handwritten.ancestors.token_pairs import Pair
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.provenance import TOKEN, ModuleFrame

TRANSFORMS = {"fft_rfft", "fft_fft"}
CONJUGATES = {"conj", "conj_physical", "resolve_conj"}


def find_correlated(frames: list[ModuleFrame], spectrum: Tensor) -> Pair | None:
    """Return the tokens of whose transforms, one of them conjugated, a spectrum is the product; None if it is another one."""
    frame = frames[-1]
    maker = skip_layouts(frame, weakref.ref(spectrum))
    if maker is None or infer_role(maker.name) is not Role.MULTIPLY or len(maker.given) != 2:
        return None
    found = [find_transformed(frame, one) for one in maker.given]
    if not any(is_conjugated for _, is_conjugated in found):
        return None
    first, second = (x for x, _ in found)
    if first is None or second is None or are_features(frames, first) or are_features(frames, second):
        return None
    return first, second


def find_transformed(frame: ModuleFrame, x: TensorRef) -> tuple[TensorRef | None, bool]:
    """Return the tokens of which x is the Fourier transform, None if it is none, and whether it is conjugated."""
    is_conjugated = False
    for _ in range(MAX_STEPS):
        maker = skip_layouts(frame, x)
        if maker is None or not maker.given:
            break
        if maker.name in TRANSFORMS:
            return (maker.given[0] if frame.find_contents(maker.given[0]) == TOKEN else None), is_conjugated
        if strip_affixes(maker.name) not in CONJUGATES:
            break
        x, is_conjugated = maker.given[0], True
    return None, is_conjugated


def are_features(frames: list[ModuleFrame], x: TensorRef) -> bool:
    """Return whether the last axis of a tensor is known to be no rows of what a layer has projected, as tokens are."""
    tensor, table = x(), AxisTable()
    if tensor is None:
        return False
    dims = table.add_dims(tensor.shape)
    found = RowSearch(table).find(frames, tensor, dims)
    return found is not None and not {*table.expand_axes(dims[-1])} <= found.rows
