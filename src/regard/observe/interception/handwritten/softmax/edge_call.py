"""The call of attention over the edges of a graph, whose weighted values are summed by an index: its weights as a matrix."""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.softmax.edge_softmax import EDGE_SUMS, EDGES
from regard.observe.interception.lookups import MASKS, read_rows
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.thread_state import STATE

EDGE_KEYS = (
    "its keys are the entries that an index sums, in their order, as the edges of a graph: each has values of its own, which "
    "no index picked from nodes"
)
CHANGED = "its keys are the neighbors of each node of a graph, whose index was written into after it picked the values"
GRAPH = "its keys are the neighbors of each node of a graph"


class EdgeSum(NamedTuple):
    """The values of edges, of which an index sums each times its weight into the entry of its receiver along an axis.

    Receivers are (edges,), or (b, edges) if those of a batch, the axes before, have other edges.
    """

    values: Tensor
    axis: int
    receivers: Tensor


class EdgeMatrix(NamedTuple):
    """The weights (b, h, q, k) of all edges from k senders to q receivers, and the values (b, h, k, d) of the senders.

    `order` are the dimensions of the values that are batch, heads, edges and width, in this order, and `shape` is that of the
    result with a dimension for each of them: receivers in place of edges. `build` computes the weights that were multiplied,
    with gradients. has_edge_keys says that the keys are the edges, not the nodes that send them.
    """

    weights: Tensor
    values: Tensor
    order: list[int]
    shape: list[int]
    build: Callable[[], Tensor]
    has_edge_keys: bool

    @property
    def note(self) -> str:
        """What the keys are."""
        return EDGE_KEYS if self.has_edge_keys else GRAPH

    def read_context(self, result: Tensor) -> Tensor:
        """Return a result of the sum as contexts (b, h, q, d)."""
        return result.reshape(self.shape).permute(self.order).reshape(*self.weights.shape[:3], self.values.shape[3])

    def write_context(self, context: Tensor, result: Tensor) -> Tensor:
        """Return contexts (b, h, q, d) as a result of the sum: written into it where the model may hold it already."""
        inverse = [self.order.index(n) for n in range(len(self.order))]
        context = context.reshape([self.shape[n] for n in self.order]).permute(inverse).reshape(result.shape)
        is_new = not result.is_inference() and not result._version  # else it may be saved for its own gradient
        return context if is_new else result.copy_(context)


def find_edge_sum(name: str, args: Any, kwargs: Any, values: Tensor) -> EdgeSum | None:
    """Return what a function of this name sums by an index; None if it does not, or not into whole entries."""
    axis, index = (kwargs.get(key, args[n] if len(args) > n else None) for n, key in ((1, "dim"), (2, "index")))
    core = strip_affixes(name)
    if core == "segment_reduce":
        axis, index = kwargs.get("dim", 0), read_segments(kwargs)
    if core not in EDGE_SUMS or type(axis) is not int or not isinstance(index, Tensor):
        return None
    axis %= values.dim()
    receivers = read_rows(index, axis if index.dim() > 1 else 0)
    if receivers is None or receivers.shape[-1] != values.shape[axis]:
        return None
    return EdgeSum(values, axis, receivers) if receivers.dim() == 1 or index.shape[:axis] == values.shape[:axis] else None


def read_segments(kwargs: Any) -> Tensor | None:
    """Return the segment of each entry (n,) that the arguments of torch.segment_reduce state; None if rows differ in theirs."""
    lengths, offsets = kwargs.get("lengths"), kwargs.get("offsets")
    lengths = offsets.diff() if lengths is None and offsets is not None else lengths
    if lengths is None or lengths.dim() != 1:
        return None
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def is_edge_softmax(name: str, args: Any, kwargs: Any, weights: Tensor) -> bool:
    """Return whether weights of edges sum to 1 for each entry into which a function of this name sums what they multiply.

    Some entry has several edges: weights of 1 may be exponentials of 0.
    """
    edges = find_edge_sum(name, args, kwargs, weights.detach())
    if edges is None or edges.receivers.dim() > 1:
        return False
    counts = edges.receivers.bincount()
    of_edges = edges.values.movedim(edges.axis, 0)
    total = of_edges.new_zeros(len(counts), *of_edges.shape[1:]).index_add_(0, edges.receivers, of_edges)[counts > 0]
    return bool((counts > 1).any()) and bool(((total - 1).abs() < torch.finfo(total.dtype).eps ** 0.5).all())


def read_index_put(args: Any, kwargs: Any) -> tuple[bool, tuple[Tensor, int, Tensor, Tensor] | None]:
    """Return whether an index_put adds, and the arguments of an index_add that does the same: None of several indices."""
    named = {**dict(zip(("indices", "values", "accumulate"), args[1:], strict=False)), **kwargs}
    indices, values, is_sum = named["indices"], named["values"], bool(named.get("accumulate"))
    is_one = len(indices) == 1 and isinstance(indices[0], Tensor) and indices[0].dim() == 1 and indices[0].dtype not in MASKS
    is_one = is_one and is_sum and values.shape == (len(indices[0]), *args[0].shape[1:])
    return is_sum, (args[0], 0, indices[0] % len(args[0]), values) if is_one else None


def build_edge_matrix(
    weights: Tensor, undropped: Tensor | None, edges: EdgeSum | None, result: Tensor, limit: int
) -> EdgeMatrix:
    """Return the weights of edges as a matrix, several edges between two nodes added up, and the values of all senders.

    If no index picked the values, the keys are the edges. The matrix is of the weights before dropout, if they were dropped. A
    value that no edge has is 0. Raises UnreadableError if the edges are not known, do not give the result, or would take more
    than `limit` bytes.
    """
    if edges is None or weights.dim() != edges.values.dim() or (undropped is not None and undropped.shape != weights.shape):
        raise UnreadableError(EDGES)
    values, axis, receivers = edges.values, edges.axis, edges.receivers
    edge_count = values.shape[axis]
    found_senders = find_senders(edges.values, edge_count, math.prod(values.shape[:axis]))
    every_edge = torch.arange(edge_count, device=values.device), edge_count
    senders, count = every_edge if found_senders is None else found_senders
    heads = [n for n in range(axis + 1, weights.dim()) if weights.shape[n] > 1]
    width = [n for n in range(axis + 1, weights.dim()) if weights.shape[n] == 1]
    b, h, d = (math.prod(values.shape[n] for n in axes) for axes in (range(axis), heads, width))
    order = [*range(axis), *heads, axis, *width]
    nodes, dtype = result.shape[axis], torch.promote_types(weights.dtype, values.dtype)
    bytes_of_matrix = b * h * nodes * count * dtype.itemsize
    if bytes_of_matrix > limit:
        raise UnreadableError(f"{GRAPH}, and its weights as a matrix would take {bytes_of_matrix:,} bytes")
    shape = [n if place <= axis else m for place, (n, m) in enumerate(zip(values.shape, weights.shape, strict=True))]
    degree = max(int(one.bincount().amax()) for one in receivers.view(-1, edge_count))
    if max(senders.dim(), receivers.dim()) > 1:
        senders, receivers = (x.expand(b, -1) for x in (senders, receivers))
    places = (receivers * count + senders).view(-1, 1, edge_count).expand(b, h, -1)

    def build_matrix(one: Tensor) -> Tensor:
        of_edges = one.to(dtype).expand(shape).permute(order).reshape(b, h, edge_count)
        return of_edges.new_zeros(b, h, nodes * count).scatter_add_(2, places, of_edges).view(b, h, nodes, count)

    matrix, picked = build_matrix(weights.detach()), values.to(dtype).permute(order).reshape(b, h, edge_count, d)
    values_of_senders = gather_first(picked, senders.view(-1, 1, edge_count).expand(b, h, -1), count)
    order_of_result = [*values.shape[:axis], nodes, *values.shape[axis + 1 :]]
    has_edge_keys = found_senders is None
    found = EdgeMatrix(matrix, values_of_senders, order, order_of_result, lambda: build_matrix(weights), has_edge_keys)
    v = values_of_senders.detach()
    eps = max(torch.finfo(values.dtype).eps, torch.finfo(result.dtype).eps)
    bound = eps * (8 + degree) * (matrix.abs() @ v.abs())
    if not bool(((matrix @ v - found.read_context(result.detach())).abs() <= bound).all()):
        raise UnreadableError(f"{GRAPH}, and its weights times the values of these do not give its result")
    return found if undropped is None else found._replace(weights=build_matrix(undropped.detach()))


def gather_first(x: Tensor, places: Tensor, count: int) -> Tensor:
    """Return entries (b, h, count, d) of which x (b, h, n, d) are copies at their places (b, h, n); 0 where there is none.

    The gradient of an entry is that of one of its copies.
    """
    numbers = torch.arange(places.shape[2], device=places.device).expand_as(places)
    first = numbers.new_full((*places.shape[:2], count), -1).scatter_(2, places, numbers).unsqueeze(-1)
    return x.gather(2, first.clamp(min=0).expand(-1, -1, -1, x.shape[3])).masked_fill(first < 0, 0)


def find_senders(values: Tensor, edge_count: int, b: int) -> tuple[Tensor, int] | None:
    """Return the sender of each edge, (edges,) or (b, edges), by the index that picked its values, and how many nodes it has.

    None if no index picked them. Raises UnreadableError if the index has changed since.
    """
    found = (skip_layouts(frame, weakref.ref(values)) for frame in reversed(STATE.frames))  # a module around may have picked
    maker = next((one for one in found if one is not None), None)
    lookup = None if maker is None else maker.lookup
    if lookup is not None and lookup.has_changed:
        raise UnreadableError(CHANGED)
    index = None if lookup is None else lookup.read_index()
    if lookup is None or index is None or index.shape[-1] != edge_count or not values.numel():
        return None
    return (index % lookup.size, lookup.size) if index.dim() == 1 or len(index) == b else None
