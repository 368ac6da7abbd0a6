"""The call of attention over the edges of a graph, whose weighted values are summed by an index: its weights as a matrix."""

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.edge_softmax import EDGE_SUMS, EDGES, skip_layouts
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import GATHERS
from regard.observe.interception.thread_state import STATE

PICKED = "its keys are the neighbors of each node of a graph, whose values are not picked by an index"
GRAPH = "its keys are the neighbors of each node of a graph"


class EdgeSum(NamedTuple):
    """The values of edges, of which an index sums each times its weight into the entry of its receiver along an axis."""

    values: Tensor
    axis: int
    receivers: Tensor


class EdgeMatrix(NamedTuple):
    """The weights (b, h, q, k) of all edges from k senders to q receivers, and the values (b, h, k, d) of the senders.

    `order` are the dimensions of the result that are batch, heads, receivers and width, in this order.
    """

    weights: Tensor
    values: Tensor
    order: list[int]

    def read_context(self, result: Tensor) -> Tensor:
        """Return a result of the sum as contexts (b, h, q, d)."""
        return result.permute(self.order).reshape(*self.weights.shape[:3], self.values.shape[3])

    def write_context(self, context: Tensor, result: Tensor) -> Tensor:
        """Write contexts (b, h, q, d) into a result of the sum, which the model may hold already, and return it."""
        inverse = [self.order.index(n) for n in range(len(self.order))]
        return result.copy_(context.reshape([result.shape[n] for n in self.order]).permute(inverse))


def find_edge_sum(name: str, args: Any, kwargs: Any, values: Tensor) -> EdgeSum | None:
    """Return what a function of this name sums by an index; None if it does not, or not into whole entries."""
    axis, index = (kwargs.get(key, args[n] if len(args) > n else None) for n, key in ((1, "dim"), (2, "index")))
    core = strip_affixes(name)
    if core not in EDGE_SUMS or type(axis) is not int or not isinstance(index, Tensor):
        return None
    axis %= values.dim()
    if index.dim() > 1:
        rows = index.movedim(axis, 0).flatten(1)
        index = rows[:, 0]
        if not bool((rows == rows[:, :1]).all()):
            return None
    return EdgeSum(values, axis, index) if len(index) == values.shape[axis] else None


def build_edge_matrix(weights: Tensor, edges: EdgeSum | None, result: Tensor, limit: int) -> EdgeMatrix:
    """Return the weights of edges as a matrix, several edges between two nodes added up, and the values of all senders.

    A value that no edge has is 0. Raises UnreadableError if they are not known, do not give the result, or would take more
    than `limit` bytes.
    """
    if edges is None or weights.dim() != edges.values.dim():
        raise UnreadableError(EDGES)
    values, axis = edges.values.detach(), edges.axis
    senders, count = find_senders(edges.values, values.shape[axis])
    heads = [n for n in range(axis + 1, weights.dim()) if weights.shape[n] > 1]
    width = [n for n in range(axis + 1, weights.dim()) if weights.shape[n] == 1]
    b, h, d = (math.prod(values.shape[n] for n in axes) for axes in (range(axis), heads, width))
    order = [*range(axis), *heads, axis, *width]
    nodes, bytes_of_matrix = result.shape[axis], b * h * result.shape[axis] * count * weights.element_size()
    if bytes_of_matrix > limit:
        raise UnreadableError(f"{GRAPH}, and its weights as a matrix would take {bytes_of_matrix:,} bytes")
    shape = [n if place <= axis else m for place, (n, m) in enumerate(zip(values.shape, weights.shape, strict=True))]
    of_edges = weights.detach().expand(shape).permute(order).reshape(b, h, len(senders))
    picked = values.permute(order).reshape(b, h, len(senders), d)
    matrix = of_edges.new_zeros(b, h, nodes * count).index_add_(2, edges.receivers * count + senders, of_edges)
    matrix = matrix.view(b, h, nodes, count)
    v = picked.new_zeros(b, h, count, d).index_copy_(2, senders, picked)
    found = EdgeMatrix(matrix, v, order)
    degree = int(edges.receivers.bincount().amax())
    bound = torch.finfo(values.dtype).eps * (8 + degree) * (matrix.abs() @ v.abs())
    if not bool(((matrix @ v - found.read_context(result.detach())).abs() <= bound).all()):
        raise UnreadableError(f"{GRAPH}, and its weights times the values of these do not give its result")
    return found


def find_senders(values: Tensor, edge_count: int) -> tuple[Tensor, int]:
    """Return the sender of each edge, by the index that picked its values, and how many nodes it was picked from."""
    found = (skip_layouts(frame, weakref.ref(values)) for frame in reversed(STATE.frames))  # a module around may have picked
    maker = next((one for one in found if one is not None), None)
    index = maker.given[1]() if maker is not None and maker.name in GATHERS and len(maker.given) > 1 else None
    if maker is None or index is None or index.dtype == torch.bool or not values.numel():
        raise UnreadableError(PICKED)
    index = index.flatten() if index.numel() == edge_count else index.flatten(1)[:, 0]
    count, rest = divmod(maker.sizes[0] * edge_count, values.numel())
    if rest or len(index) != edge_count or int(index.amax()) >= count:
        raise UnreadableError(PICKED)
    return index % count, count
