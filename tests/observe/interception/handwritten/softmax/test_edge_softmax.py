"""Attention over the edges of a graph, whose softmax sums exponentials by an index, is recorded as a matrix of its weights."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.attention_changes import CutEdges, KnockOut, Temperature
from regard.observe.interception.handwritten import handwritten_call
from regard.observe.interception.handwritten.handwritten_call import SPARSE, UNFOLLOWED
from regard.observe.interception.handwritten.softmax.edge_call import CHANGED, EDGE_KEYS, GRAPH
from regard.observe.interception.handwritten.softmax.edge_softmax import EDGES
from regard.observe.intervene import intervene
from regard.observe.record import record
from regard.observe.recording import Recording

NODES, EDGE_COUNT, C, H, D, GRAPHS = 11, 37, 12, 3, 5, 2
SENDERS, RECEIVERS = torch.randint(NODES, (2, EDGE_COUNT), generator=torch.Generator().manual_seed(3))


def add_by_index(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)


def scatter(x: Tensor, index: Tensor, size: int) -> Tensor:
    places = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_add_(0, places, x)


def reduce_by_scatter(x: Tensor, index: Tensor, size: int) -> Tensor:
    places = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_reduce(0, places, x, "sum")


def average(x: Tensor, index: Tensor, size: int) -> Tensor:
    places = index.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.new_zeros(size, *x.shape[1:]).scatter_reduce(0, places, x, "mean", include_self=False)


def put(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, *x.shape[1:]).index_put_((index - size,), x, accumulate=True)


class Aggregation(nn.Module):
    """A module that sums what the one around it multiplied, as in PyTorch Geometric."""

    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        return add_by_index(x, index, size)


Add = Callable[[Tensor, Tensor, int], Tensor]
SUMS: dict[str, Add] = {"index_add": add_by_index, "scatter_add": scatter, "scatter_reduce": reduce_by_scatter}

GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "x[index]": lambda x: x[SENDERS],
    "x[index of a copy]": lambda x: (2 * x / 2)[torch.stack([RECEIVERS, SENDERS])[1]],
    "index_select": lambda x: x.index_select(0, SENDERS),
    "gather": lambda x: x.gather(0, SENDERS.view(-1, 1, 1).expand(-1, H, D)),
    "negative": lambda x: x[SENDERS - NODES],
    "flat": lambda x: x.flatten(1)[SENDERS].view(-1, H, D),
    "x[index, :]": lambda x: x[SENDERS, :],
    "x[index, ..., n]": lambda x: torch.stack([2 * x, x], -1)[SENDERS, ..., 1],
    "x[n, index]": lambda x: torch.stack([2 * x, x])[1, SENDERS],
    "gather of columns": lambda x: torch.cat([x, 2 * x], 1).gather(0, SENDERS.view(-1, 1, 1).expand(-1, H, D)),
    "take_along_dim": lambda x: x.take_along_dim(SENDERS.view(-1, 1, 1), dim=0),
    "int32": lambda x: x[SENDERS.int()],
    "F.embedding": lambda x: F.embedding(SENDERS, x.flatten(1)).unflatten(-1, (H, D)),
    "torch.embedding": lambda x: torch.embedding(x.flatten(1), SENDERS).unflatten(-1, (H, D)),
}


MULTIPLIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unsqueeze": lambda weights, values: weights.unsqueeze(-1) * values,
    "None": lambda weights, values: values * weights[..., None],
    "einsum": lambda weights, values: torch.einsum("eh,ehd->ehd", weights, values),
    "einsum of the transposed": lambda weights, values: torch.einsum("he,ehd->ehd", weights.T, values),
}


def exponentiate(scores: Tensor) -> Tensor:
    """Return the exponentials of scores of edges, less the largest of each receiver."""
    places = RECEIVERS.unsqueeze(-1).expand_as(scores)
    largest = scores.new_full((NODES, H), -torch.inf).scatter_reduce(0, places, scores.detach(), "amax")
    return (scores - largest.index_select(0, RECEIVERS)).exp()


def divide_by_sums(e: Tensor, add: Add, index: Tensor, size: int) -> Tensor:
    return e / (add(e, index, size) + 1e-16).index_select(0, index)


class GraphAttention(nn.Module):
    """Scores of a sender and a receiver are added, as in GAT."""

    def __init__(
        self, add: Add, divides_after: bool = False, adds_edges: bool = False, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.adds_edges, self.gather = adds_edges, GATHERS["x[index]"] if gather is None else gather
        self.project, self.add, self.divides_after = nn.Linear(C, H * D), add, divides_after
        self.sends, self.receives = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        sent, received = (x * self.sends).sum(-1), (x * self.receives).sum(-1)
        self.scores = scores = F.leaky_relu(sent.index_select(0, SENDERS) + received.index_select(0, RECEIVERS), 0.2)
        e = exponentiate(scores).contiguous()
        e.view(-1).clamp_(min=0)
        if self.divides_after:
            context = self.add(e.unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES)
            return context / (self.add(e, RECEIVERS, NODES).unsqueeze(-1) + 1e-16)
        weights = divide_by_sums(e, self.add if self.add in SUMS.values() else add_by_index, RECEIVERS, NODES)
        values = self.gather(x) + x[RECEIVERS] if self.adds_edges else self.gather(x)
        return self.add(weights.unsqueeze(-1) * values, RECEIVERS, NODES).mean(1)


class WidthFirstAttention(nn.Module):
    """Heads stand behind their width, and are summed into a tensor that is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(C, D * H), nn.Linear(C, H)

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.score(x)[SENDERS] + self.score(x).square()[RECEIVERS]
        weights = divide_by_sums(exponentiate(self.scores), add_by_index, RECEIVERS, NODES)
        result = x.new_zeros(NODES, D, H)
        result.index_add_(0, RECEIVERS, weights.unsqueeze(1) * self.project(x).unflatten(-1, (D, H))[SENDERS])
        return result.mean(2)


class SenderAttention(nn.Module):
    """Scores are of the sender alone, computed for each node or for each edge."""

    def __init__(self, add: Add, scores_nodes: bool) -> None:
        super().__init__()
        self.project, self.add, self.scores_nodes = nn.Linear(C, H * D), add, scores_nodes
        self.sends = nn.Parameter(torch.randn(H, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        scores = (x * self.sends).sum(-1)[SENDERS] if self.scores_nodes else (x[SENDERS] * self.sends).sum(-1)
        self.scores = scores = F.leaky_relu(scores, 0.2)
        weights = divide_by_sums(exponentiate(scores), self.add, RECEIVERS, NODES)
        return self.add(weights.unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES).flatten(1)


class FreedIndexAttention(nn.Module):
    """Scores of the sender alone, picked by an index that is freed before the sum."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.score, self.pick = nn.Linear(C, C), nn.Linear(C, 1), pick

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.stack([SENDERS, RECEIVERS])[:, : NODES - 2]
        self.scores = self.pick(self.score(self.project(x)), edges)
        e = self.scores.exp()
        weights = divide_by_sums(e, add_by_index, edges[1], len(x))
        return add_by_index(weights * x[edges[0]], edges[1], len(x))


def pick_by_unbind(scores: Tensor, edges: Tensor) -> Tensor:
    senders, _ = edges.unbind()
    return scores[senders]


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unbind": pick_by_unbind,
    "a row": lambda scores, edges: scores[edges[0]],
    "a column": lambda scores, edges: scores.index_select(0, edges.mT[:, 0]),
    "a copy": lambda scores, edges: scores[torch.cat([SENDERS, RECEIVERS])][: edges.shape[1]],
}


class BatchAttention(nn.Module):
    """The nodes of several graphs with the same edges are picked along the second axis, scores by one number for each."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.pick = nn.Linear(C, H * D), pick
        self.sends, self.receives = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        sent, received = (x * self.sends).sum(-1), (x * self.receives).sum(-1)
        self.scores = self.pick(sent, SENDERS) + self.pick(received, RECEIVERS)
        e = self.scores.exp()
        weights = e / self.pick(torch.zeros_like(sent).index_add(1, RECEIVERS, e), RECEIVERS)
        return torch.zeros_like(x).index_add(1, RECEIVERS, weights.unsqueeze(-1) * self.pick(x, SENDERS))


class OwnEdgesAttention(nn.Module):
    """Each graph of a batch has other edges: the indices of senders and of receivers are (graphs, edges)."""

    def __init__(self, senders: Tensor, receivers: Tensor, picks_pairs: bool = False) -> None:
        super().__init__()
        self.project, self.senders, self.receivers, self.picks_pairs = nn.Linear(C, H * D), senders, receivers, picks_pairs
        self.sends, self.receives = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))
        self.graphs = torch.arange(len(senders)).unsqueeze(-1).expand_as(senders)

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        if self.picks_pairs:
            return x[self.graphs, index]
        return x.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if self.picks_pairs:
            return torch.zeros_like(y).index_put((self.graphs, self.receivers), x, accumulate=True)
        places = self.receivers.view(*self.receivers.shape, *[1] * (x.dim() - 2)).expand_as(x)
        return torch.zeros_like(y).scatter_add(1, places, x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        sent, received = (x * self.sends).sum(-1), (x * self.receives).sum(-1)
        self.scores = self.pick(sent, self.senders) + self.pick(received, self.receivers)
        e = self.scores.exp()
        weights = e / self.pick(self.add(e, sent), self.receivers)
        return self.add(weights.unsqueeze(-1) * self.pick(x, self.senders), x)


class EqualNodes(nn.Module):
    """Nodes without features are all equal, and scores differ by edge; an index may change after it picked the values."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.score, self.changes = nn.Parameter(torch.randn(EDGE_COUNT, 1)), changes

    def forward(self, x: Tensor) -> Tensor:
        x, senders = x[:1].expand(NODES, C).clone(), SENDERS.clone()
        self.scores = x.mean(-1, keepdim=True)[senders] + x.mean(-1, keepdim=True)[RECEIVERS] + self.score
        weights = divide_by_sums(self.scores.exp(), add_by_index, RECEIVERS, NODES)
        values = x[senders]
        if self.changes:
            senders.copy_(RECEIVERS)
        return add_by_index(weights * values, RECEIVERS, NODES)


class DroppedAttention(SenderAttention):
    """A softmax over edges with dropout of its weights, by a function or a module."""

    def __init__(self, drop: Callable[[Tensor], Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(add_by_index, scores_nodes=True)
        self.drop, self.multiply = drop, multiply

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        self.scores = scores = (x * self.sends).sum(-1)[SENDERS]
        weights = self.drop(divide_by_sums(scores.exp(), add_by_index, RECEIVERS, NODES))
        return add_by_index(self.multiply(weights, x[SENDERS]), RECEIVERS, NODES)


DIVISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one over sums, picked": lambda e: e * (1 / add_by_index(e, RECEIVERS, NODES))[RECEIVERS],
    "one over picked sums": lambda e: e * (1 / add_by_index(e, RECEIVERS, NODES)[RECEIVERS]),
    "a reciprocal": lambda e: (scatter(e, RECEIVERS, NODES) + 1e-16).reciprocal().index_select(0, RECEIVERS) * e,
    "sums that F.embedding picks": lambda e: e / F.embedding(RECEIVERS, add_by_index(e, RECEIVERS, NODES)),
}


class DividedAttention(SenderAttention):
    """Scores that F.embedding picks, whose exponentials are divided by their sums in any way."""

    def __init__(self, divide: Callable[[Tensor], Tensor]) -> None:
        super().__init__(add_by_index, scores_nodes=True)
        self.divide = divide

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        self.scores = scores = F.embedding(SENDERS, (x * self.sends).sum(-1))
        return add_by_index(self.divide(scores.exp()).unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES)


class SegmentAttention(nn.Module):
    """Edges in the order of their receivers, whose segments are summed."""

    senders, receivers = SENDERS[RECEIVERS.argsort(stable=True)], RECEIVERS.sort().values

    def __init__(self, has_offsets: bool) -> None:
        super().__init__()
        self.project, self.score, lengths = nn.Linear(C, D), nn.Linear(C, 1), RECEIVERS.bincount(minlength=NODES)
        self.segments = {"offsets": F.pad(lengths.cumsum(0), (1, 0))} if has_offsets else {"lengths": lengths}

    def add(self, x: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", axis=0, **self.segments)

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.score(x)[self.senders] + self.score(x).square()[self.receivers]
        e = self.scores.exp()
        return self.add(e / self.add(e)[self.receivers] * self.project(x)[self.senders])


def add_scores(module: nn.Module, x: Tensor, neighbors: Tensor, node: int) -> Tensor:
    return F.leaky_relu(module.sends(x[neighbors]) + module.receives(x[node]))


def add_scores_in_a_module(module: nn.Module, x: Tensor, neighbors: Tensor, node: int) -> Tensor:
    return module.activate(module.receives(x[node]) + module.sends(x[neighbors])).squeeze(-1)


def score_edges(module: nn.Module, x: Tensor, neighbors: Tensor, node: int) -> Tensor:
    edges = SENDERS[: NODES - 2], RECEIVERS[: NODES - 2]
    return module.score(torch.cat([x[edges[0]], x[edges[1]]], -1))[edges[1] == node]


def divide_by_sum(scores: Tensor) -> Tensor:
    e = scores.exp()
    return e / e.sum()


def divide_shifted_by_sum(scores: Tensor) -> Tensor:
    e = torch.exp(scores - scores.max())
    return e / (e.sum(0, keepdim=True) + 1e-300)


class LoopAttention(nn.Module):
    """A softmax over the neighbors of each node, one node after the other; there may be fewer edges than nodes."""

    def __init__(self, score_neighbors: Callable[..., Tensor], normalize: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.normalize = partial(torch.softmax, dim=0) if normalize is None else normalize
        self.project, self.sends, self.receives = nn.Linear(C, D), nn.Linear(D, 1), nn.Linear(D, 1)
        self.activate, self.score = nn.LeakyReLU(), nn.Sequential(nn.Linear(2 * D, D), nn.Tanh(), nn.Linear(D, 1))
        self.score_neighbors = score_neighbors

    def forward(self, x: Tensor) -> Tensor:
        x, self.weights, contexts = self.project(x), [], []
        for node in RECEIVERS[: NODES - 2].unique().tolist():
            neighbors = SENDERS[: NODES - 2][RECEIVERS[: NODES - 2] == node]
            weights = self.normalize(self.score_neighbors(self, x, neighbors, node)).view(-1, 1)
            self.weights += [weights.mT.detach()] if len(neighbors) > 1 else []  # that of one neighbor is 1
            contexts.append((weights * x[neighbors]).sum(0))
        return torch.stack(contexts)


class LogSumAttention(nn.Module):
    """Exponentials of scores less the logarithm of their sum, which need no division."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.project, self.score, self.add = nn.Linear(C, C), nn.Linear(C, 1), add

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)[SENDERS] + self.score(x).square()[RECEIVERS]
        weights = (scores - self.add(scores.exp(), RECEIVERS, NODES).log()[RECEIVERS]).exp()
        return self.add(weights * self.project(x)[SENDERS], RECEIVERS, NODES)


class SparseAttention(nn.Module):
    """The weights are the entries of a sparse matrix, as in pyGAT."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.score = nn.Linear(C, C), nn.Linear(2 * C, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        e = F.leaky_relu(self.score(torch.cat([x[RECEIVERS], x[SENDERS]], -1)).squeeze(-1)).exp()
        matrix = torch.sparse_coo_tensor(torch.stack([RECEIVERS, SENDERS]), e, (NODES, NODES), check_invariants=True)
        return (matrix @ x) / (matrix @ torch.ones(NODES, 1))


class FlatSumAttention(nn.Module):
    """Weighted values have their heads and width in one dimension before they are summed; weights may be of another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project, self.score, self.dtype = nn.Linear(C, H * D), nn.Linear(C, H), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.score(x)[SENDERS] + self.score(x).square()[RECEIVERS]
        weights = divide_by_sums(exponentiate(self.scores), add_by_index, RECEIVERS, NODES)
        values = self.project(x).to(self.dtype).unflatten(-1, (H, D))[SENDERS]
        return add_by_index((weights.unsqueeze(-1) * values).flatten(1), RECEIVERS, NODES)


class VectorAttention(nn.Module):
    """A network scores each channel of the difference of two tokens, as in a point transformer."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.query, self.key, self.value, self.score = (nn.Linear(C, C) for _ in range(4))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.score(self.query(x)[RECEIVERS] - self.key(x)[SENDERS])
        weights = divide_by_sums(self.scores.exp(), self.add, RECEIVERS, NODES)
        return self.add(weights * self.value(x)[SENDERS], RECEIVERS, NODES)


class Pooling(nn.Module):
    """One row of weights for each graph, over the tokens that are no padding."""

    def __init__(self, add: Add, keeps_index: bool = True) -> None:
        super().__init__()
        self.score, self.add, self.keeps_index = nn.Linear(C, 1), add, keeps_index

    def forward(self, x: Tensor) -> Tensor:
        x = x[torch.arange(NODES - 2)] if self.keeps_index else x[torch.arange(2 * NODES - 4).view(2, -1)[0]]
        graphs = torch.arange(len(x)) % GRAPHS
        self.scores = scores = self.score(x)
        e = (scores - self.add(scores, graphs, GRAPHS)[graphs]).exp()
        return self.add(divide_by_sums(e, self.add, graphs, GRAPHS) * x, graphs, GRAPHS)


class ClusterPooling(nn.Module):
    """One row of weights for each graph, by products with a matrix of zeros and ones."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.score, self.add = nn.Linear(C, 1), add

    def forward(self, x: Tensor) -> Tensor:
        graphs = F.one_hot(torch.arange(NODES) % GRAPHS).to(x.dtype)
        e = (self.score(x) - self.add(self.score(x), torch.arange(NODES) % GRAPHS, GRAPHS).mean()).exp()
        return graphs.mT @ (e / (graphs @ (graphs.mT @ e)) * x)


class GaussianFilter(nn.Module):
    """Exponentials that nothing divides by their sums."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        e = (-(x[RECEIVERS] - x[SENDERS]).square()).exp()
        return self.add(e * x[SENDERS], RECEIVERS, NODES)


def record_module(module: nn.Module, missing: bool) -> Recording:
    return record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(NODES, C)), missing)[0]


def check_map(module: nn.Module, senders: Tensor = SENDERS, receivers: Tensor = RECEIVERS) -> None:
    """Hold the map of a module against a softmax over the edges of each node, one node after the other, in float64."""
    module = module.double()
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(NODES, C, dtype=torch.float64)), False)
    (_,), (note,) = recording.calls, recording.notes
    assert f": {GRAPH}" in note
    weights = recording.map(0).dense()[0]
    scores = module.scores.view(len(senders), -1)
    for node in range(NODES):
        mine = (receivers == node).nonzero().squeeze(-1)
        expected = torch.zeros(NODES, scores.shape[1], dtype=torch.float64)
        expected.index_add_(0, senders[mine], scores[mine].softmax(0))
        torch.testing.assert_close(weights[:, node], expected.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("gather", GATHERS)
def test_attention_of_a_graph_with_added_scores_is_recorded(name, gather):
    check_map(GraphAttention(SUMS[name], gather=GATHERS[gather]))


def test_values_may_be_picked_by_the_module_around_the_one_that_sums():
    check_map(GraphAttention(Aggregation()))


@pytest.mark.parametrize("name", [*SUMS, "width first"])
def test_a_head_of_a_graph_can_be_knocked_out(name):
    module = WidthFirstAttention().double() if name == "width first" else GraphAttention(SUMS[name]).double()
    x = torch.randn(NODES, C, dtype=torch.float64)
    with torch.no_grad(), record(module) as recording:
        plain = module(x)
    shape, order = ((D, H), (2, 0, 1)) if name == "width first" else ((H, D), (1, 0, 2))
    contexts = recording.map(0).dense()[0] @ module.project(x).unflatten(-1, shape).permute(order)
    torch.testing.assert_close(contexts.mean(0), plain, rtol=1e-12, atol=1e-12)
    contexts[1] = 0
    with torch.no_grad(), intervene(module, KnockOut(0, 1)):
        changed = module(x)
    torch.testing.assert_close(changed, contexts.mean(0), rtol=1e-12, atol=1e-12)


def test_a_temperature_of_a_graph_is_not_made_and_warned_of():
    module, x = GraphAttention(SUMS["index_add"]).double(), torch.randn(NODES, C, dtype=torch.float64)
    told = pytest.warns(UserWarning, match="Temperature of layer 0 was not applied: .*its weights are stored as they are")
    with torch.no_grad(), told, intervene(module, Temperature(0, t=2.0)):
        changed = module(x)
    with torch.no_grad():
        assert torch.equal(changed, module(x))


@pytest.mark.parametrize("name", SUMS)
def test_exponentials_that_are_divided_after_the_sum_are_missed(name):
    recording = record_module(GraphAttention(SUMS[name], divides_after=True), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]
    assert recording.missed[0].kernel == f"by hand: exp, mul and {name}"


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("scores_nodes", [False, True])
def test_attention_of_a_graph_with_scores_of_the_sender_alone_is_recorded(name, scores_nodes):
    check_map(SenderAttention(SUMS[name], scores_nodes))


def test_heads_may_stand_behind_their_width():
    check_map(WidthFirstAttention())


@pytest.mark.parametrize("name", PICKS)
def test_attention_of_a_graph_whose_index_is_freed_is_recorded(name):
    with torch.no_grad():  # a graph keeps the index
        check_map(FreedIndexAttention(PICKS[name]), SENDERS[: NODES - 2], RECEIVERS[: NODES - 2])


@pytest.mark.parametrize("pick", [lambda x, i: x[:, i], lambda x, i: x[:, i, ...], lambda x, i: x.index_select(1, i)])
def test_graphs_of_a_batch_with_the_same_edges_are_recorded(pick):
    module, x = BatchAttention(pick).double(), torch.randn(GRAPHS, NODES, C, dtype=torch.float64)
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(x))
    found = recording.map(0).dense()
    assert found.shape == (GRAPHS, H, NODES, NODES)
    for node in range(NODES):
        mine = (node == RECEIVERS).nonzero().squeeze(-1)
        expected = torch.zeros(GRAPHS, NODES, H, dtype=torch.float64)
        expected.index_add_(1, SENDERS[mine], module.scores[:, mine].softmax(1))
        torch.testing.assert_close(found[:, :, node], expected.mT, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 4), st.integers(2, 7), st.integers(2, 23), st.booleans(), st.booleans())
def test_graphs_of_a_batch_with_other_edges_are_recorded(graphs, nodes, edges, share_senders, share_receivers):
    senders, receivers = torch.randint(nodes, (2, graphs, edges))
    senders = senders[:1].expand(graphs, -1) if share_senders else senders
    receivers = receivers[:1].expand(graphs, -1) if share_receivers else receivers
    module = OwnEdgesAttention(senders, receivers).double()
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(graphs, nodes, C).double()))
    found = recording.map(0).dense()
    for graph, node in product(range(graphs), range(nodes)):
        mine = receivers[graph] == node
        expected = torch.zeros(nodes, H, dtype=torch.float64)
        expected.index_add_(0, senders[graph, mine], module.scores[graph, mine].softmax(0))
        torch.testing.assert_close(found[graph, :, node], expected.mT, rtol=1e-12, atol=1e-12)


def test_a_head_of_a_batch_with_other_edges_can_be_knocked_out():
    module = OwnEdgesAttention(*torch.randint(NODES, (2, GRAPHS, EDGE_COUNT))).double()
    x = torch.randn(GRAPHS, NODES, C, dtype=torch.float64)
    with torch.no_grad(), intervene(module, KnockOut(0, 1)):
        changed = module(x)
    with torch.no_grad():
        assert torch.equal(changed[:, :, [0, 2]], module(x)[:, :, [0, 2]])
        assert not changed[:, :, 1].any()


def test_edges_that_pairs_of_indices_pick_and_sum_are_missed():
    module = OwnEdgesAttention(*torch.randint(NODES, (2, GRAPHS, EDGE_COUNT)), picks_pairs=True)
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(GRAPHS, NODES, C)), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_index_that_changes_after_it_picked_equal_values_is_missed(mode):
    with mode():
        check_map(EqualNodes(changes=False))
        recording = record_module(EqualNodes(changes=True), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", CHANGED)]


def test_an_index_that_inference_mode_changes_later_was_copied():
    with torch.inference_mode():
        check_map(EqualNodes(changes=True))


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), partial(F.dropout, p=0.5), nn.Identity()])
@pytest.mark.parametrize("multiply", MULTIPLIES)
def test_weights_of_edges_are_those_before_dropout(drop, multiply):
    check_map(DroppedAttention(drop, MULTIPLIES[multiply]))


@pytest.mark.parametrize("name", DIVISIONS)
def test_exponentials_may_be_multiplied_by_one_over_their_sums(name):
    check_map(DividedAttention(DIVISIONS[name]))


@pytest.mark.parametrize("has_offsets", [False, True])
def test_sums_may_be_those_of_segments(has_offsets):
    check_map(SegmentAttention(has_offsets), SegmentAttention.senders, SegmentAttention.receivers)


@pytest.mark.parametrize("score_neighbors", [add_scores, add_scores_in_a_module, score_edges])
@pytest.mark.parametrize("normalize", [None, divide_by_sum, divide_shifted_by_sum])
def test_attention_in_a_loop_over_nodes_is_recorded_node_by_node(score_neighbors, normalize):
    module = LoopAttention(score_neighbors, normalize).double()
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(NODES, C, dtype=torch.float64)))
    maps = [call.map.dense()[0, 0] for call in recording.calls]
    assert all(torch.equal(one, torch.ones(1, 1, dtype=torch.float64)) for one in maps if one.shape[1] == 1)
    several = [one for one in maps if one.shape[1] > 1]
    assert len(several) == len(module.weights) > 0
    for found, weights in zip(several, module.weights, strict=True):
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)


def test_sums_may_be_written_by_index_put():
    check_map(GraphAttention(put))
    check_map(SenderAttention(put, scores_nodes=True))


@pytest.mark.parametrize("name", SUMS)
def test_a_softmax_of_edges_without_a_division_is_missed(name):
    recording = record_module(LogSumAttention(SUMS[name]), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]


def test_weights_in_a_sparse_matrix_are_missed():
    recording = record_module(SparseAttention(), missing=True)
    assert {(one.module, one.reason) for one in recording.missed} == {("0", SPARSE)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_heads_may_be_joined_before_the_sum(dtype):
    check_map(FlatSumAttention(dtype))


@pytest.mark.parametrize("name", SUMS)
def test_edges_with_values_of_their_own_are_the_keys(name):
    module = GraphAttention(SUMS[name], adds_edges=True).double()
    x = torch.randn(NODES, C, dtype=torch.float64)
    recording, output = record_and_compare(nn.Sequential(module), lambda m: m(x), keep="values")
    (call,), (note,) = recording.calls, recording.notes
    assert EDGE_KEYS in note
    assert (call.kind, call.map.shape) == ("cross", (1, H, NODES, EDGE_COUNT))
    expected = torch.zeros(H, NODES, EDGE_COUNT, dtype=torch.float64)
    for node in RECEIVERS.unique():
        mine = (node == RECEIVERS).nonzero().squeeze(-1)
        expected[:, node, mine] = module.scores[mine].softmax(0).mT
    torch.testing.assert_close(call.map.dense()[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((expected @ call.stored.v[0]).mean(0), output, rtol=1e-12, atol=1e-12)


def test_means_over_the_neighbors_are_missed():
    recording = record_module(GraphAttention(average), missing=True)
    assert [one.module for one in recording.missed] == ["0"]
    assert "do not give its result" in recording.missed[0].reason


def test_a_graph_whose_matrix_is_too_large_is_missed(monkeypatch):
    monkeypatch.setattr(handwritten_call, "LIMIT_BYTES", 4 * H * NODES**2 - 1)
    recording = record_module(GraphAttention(add_by_index), missing=True)
    assert recording.missed[0].reason == f"{GRAPH}, and its weights as a matrix would take {4 * H * NODES**2:,} bytes"


@pytest.mark.parametrize("name", SUMS)
def test_a_weight_for_each_channel_is_a_head(name):
    check_map(VectorAttention(SUMS[name]))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("keeps_index", [False, True])
def test_pooling_by_an_index_has_a_query_for_each_graph(keeps_index, name):
    module = Pooling(SUMS[name], keeps_index).double()
    recording, _ = record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(NODES, C, dtype=torch.float64)))
    (call,) = recording.calls
    expected = torch.zeros(GRAPHS, NODES, dtype=torch.float64)
    for graph in range(GRAPHS):
        expected[graph, graph : NODES - 2 : GRAPHS] = module.scores[graph::GRAPHS, 0].softmax(0)
    torch.testing.assert_close(call.map.dense()[0, 0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_filters_by_an_index_are_no_attention(name):
    with torch.no_grad():
        recording = record_module(GaussianFilter(SUMS[name]), missing=False)
    assert not recording.calls


@pytest.mark.parametrize("name", SUMS)
def test_pooling_by_a_matrix_of_zeros_and_ones_is_missed(name):
    recording = record_module(ClusterPooling(SUMS[name]), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", UNFOLLOWED)]


class PlainGraphAttention(nn.Module):
    """Scores of a sender and a receiver are added, in operations that all have a gradient."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.project, self.score, self.add = nn.Linear(C, H * D), nn.Linear(C, H), add

    def forward(self, x: Tensor) -> Tensor:
        scores = F.leaky_relu(self.score(x)[SENDERS] + self.score(x).sin()[RECEIVERS], 0.2)
        weights = divide_by_sums(exponentiate(scores), self.add, RECEIVERS, NODES)
        return self.add(weights.unsqueeze(-1) * self.project(x).unflatten(-1, (H, D))[SENDERS], RECEIVERS, NODES).mean(1)


def leave_out_edges(module: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    """The output of a graph attention with some edges hidden from its softmax, node by node."""
    values = module.project(x).unflatten(-1, (H, D) if isinstance(module, PlainGraphAttention) else (D, H))
    values = values if isinstance(module, PlainGraphAttention) else values.transpose(1, 2)
    if isinstance(module, PlainGraphAttention):
        scores = F.leaky_relu(module.score(x)[SENDERS] + module.score(x).sin()[RECEIVERS], 0.2)
    else:
        scores = module.score(x)[SENDERS] + module.score(x).square()[RECEIVERS]
    edges = [((node == RECEIVERS) & ~hidden).nonzero()[:, 0] for node in range(NODES)]
    return torch.stack([(scores[one].softmax(0)[..., None] * values[SENDERS[one]]).sum((0, 1)) / H for one in edges])


@pytest.mark.parametrize("name", [*SUMS, "width first"])
def test_cut_edges_of_a_graph_have_the_gradients_of_the_graph_without_them(name):
    module = WidthFirstAttention() if name == "width first" else PlainGraphAttention(SUMS[name])
    module, x = module.double(), torch.randn(NODES, C, dtype=torch.float64, requires_grad=True)
    nodes = RECEIVERS.bincount().topk(2).indices
    keys = torch.stack([SENDERS[node == RECEIVERS][0] for node in nodes])
    with intervene(module, CutEdges(queries=nodes.tolist(), keys=keys.tolist())):
        changed = module(x)
    expected, inputs = (
        leave_out_edges(module, x, torch.isin(RECEIVERS, nodes) & torch.isin(SENDERS, keys)),
        list(module.parameters()),
    )
    torch.testing.assert_close(changed, expected, rtol=1e-12, atol=1e-12)
    outward = torch.randn_like(changed)
    ours, theirs = (torch.autograd.grad(y, [x, *inputs], outward) for y in (changed, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert not torch.allclose(changed, module(x))


@pytest.mark.parametrize("has_gradients", [True, False])
def test_edges_of_weights_that_are_dropped_are_not_cut_and_warned_of(has_gradients):
    module = DroppedAttention(nn.Dropout(0.5), MULTIPLIES["unsqueeze"]).double().train()
    x = torch.randn(NODES, C, dtype=torch.float64)
    told = pytest.warns(UserWarning, match=r"CutEdges of all layers was not applied: .*cannot be computed again.*dropout")
    with torch.set_grad_enabled(has_gradients):
        torch.manual_seed(4)
        with told, intervene(module, CutEdges(queries=[1, 2], keys=[3, 4])):
            changed = module(x)
        torch.manual_seed(4)
        assert torch.equal(changed, module(x))
