"""Lambda layers: queries read sums of values by keys that are a softmax over the tokens. https://arxiv.org/abs/2102.08602"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.handwritten.linear.linear_attention import ChainRoles, find_roles
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.score_form import start_form
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace, TraceKind

LAMBDAS = (
    "its sums of values over the tokens are multiplied with queries, as in lambda layers: this is linear attention, beside the "
    "map of each feature over the tokens; what it adds for positions is in neither"
)
UNREAD_LAMBDAS = (
    "its sums of values over the tokens are multiplied with queries, as in lambda layers: the map is of each feature over the "
    "tokens, and neither these products nor those with positions are recorded"
)


class Summary(NamedTuple):
    """The product that a sum of values by weights is, the place of the weights, and the watchers of its module."""

    owners: list[tuple[Any, str]]
    product: LabelledProduct | None
    place: int


def read_summary(table: AxisTable, summary: Summary, product: LabelledProduct, place: int) -> tuple[ChainRoles, Trace] | None:
    """Return the roles of queries, keys and values, and a trace of a summary that a product multiplies with queries.

    The summary is the operand at a place. None if the queries have no axis of its weights alone.
    """
    if summary.product is None:
        return None
    form, x, q = start_form(table, summary.product), product.operands[place], product.operands[1 - place]
    dims = fit_view(form.dims, x, [summary.product.get_size(label) for label in summary.product.result])
    if dims is None:
        return None
    all_dims = product.build_dims(table, {place: dims})
    roles = find_roles(table, form, q, all_dims[1 - place], all_dims[2])
    if roles is None or roles.k is not summary.product.operands[summary.place]:
        return None
    return roles, Trace(weakref.ref(x), TraceKind.SCORES, True, 0, x.numel(), dims=dims, form=form)


def fit_view(dims: Dims, x: Tensor, shape: list[int]) -> Dims | None:
    """Return the axes of x, a view that adds or drops dimensions of size 1 of a shape; None for another one."""
    axes = iter([one for one, size in zip(dims, shape, strict=True) if size > 1])
    if [size for size in x.shape if size > 1] != [size for size in shape if size > 1]:
        return None
    return tuple(next(axes) if size > 1 else () for size in x.shape)
