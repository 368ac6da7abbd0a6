"""Attention over the edges of a graph, whose softmax sums exponentials by an index, is missed with a reason."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.edge_softmax import EDGES
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


Add = Callable[[Tensor, Tensor, int], Tensor]
SUMS: dict[str, Add] = {"index_add": add_by_index, "scatter_add": scatter, "scatter_reduce": reduce_by_scatter}


def divide_by_sums(e: Tensor, add: Add, index: Tensor, size: int) -> Tensor:
    return e / (add(e, index, size) + 1e-16).index_select(0, index)


class GraphAttention(nn.Module):
    """Scores of a sender and a receiver are added, as in GAT."""

    def __init__(self, add: Add, divides_after: bool = False) -> None:
        super().__init__()
        self.project, self.add, self.divides_after = nn.Linear(C, H * D), add, divides_after
        self.sends, self.receives = nn.Parameter(torch.randn(H, D)), nn.Parameter(torch.randn(H, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        sent, received = (x * self.sends).sum(-1), (x * self.receives).sum(-1)
        scores = F.leaky_relu(sent.index_select(0, SENDERS) + received.index_select(0, RECEIVERS), 0.2)
        e = (scores - scores.amax()).exp().contiguous()
        e.view(-1).clamp_(min=0)
        if self.divides_after:
            context = self.add(e.unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES)
            return context / (self.add(e, RECEIVERS, NODES).unsqueeze(-1) + 1e-16)
        weights = divide_by_sums(e, self.add, RECEIVERS, NODES)
        return self.add(weights.unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES).mean(1)


class SenderAttention(nn.Module):
    """Scores are of the sender alone, computed for each node or for each edge."""

    def __init__(self, add: Add, scores_nodes: bool) -> None:
        super().__init__()
        self.project, self.add, self.scores_nodes = nn.Linear(C, H * D), add, scores_nodes
        self.sends = nn.Parameter(torch.randn(H, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).unflatten(-1, (H, D))
        scores = (x * self.sends).sum(-1)[SENDERS] if self.scores_nodes else (x[SENDERS] * self.sends).sum(-1)
        scores = F.leaky_relu(scores, 0.2)
        places = RECEIVERS.unsqueeze(-1).expand_as(scores)
        largest = scores.new_full((NODES, H), -torch.inf).scatter_reduce(0, places, scores.detach(), "amax")
        weights = divide_by_sums((scores - largest.index_select(0, RECEIVERS)).exp(), self.add, RECEIVERS, NODES)
        return self.add(weights.unsqueeze(-1) * x[SENDERS], RECEIVERS, NODES).flatten(1)


class FreedIndexAttention(nn.Module):
    """Scores of the sender alone, picked by an index that is freed before the sum."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project, self.score, self.pick = nn.Linear(C, C), nn.Linear(C, 1), pick

    def forward(self, x: Tensor) -> Tensor:
        edges = torch.stack([SENDERS, RECEIVERS])[:, : NODES - 2]
        e = self.pick(self.score(self.project(x)), edges).exp()
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


class VectorAttention(nn.Module):
    """A network scores each channel of the difference of two tokens, as in a point transformer."""

    def __init__(self, add: Add) -> None:
        super().__init__()
        self.query, self.key, self.value, self.score = (nn.Linear(C, C) for _ in range(4))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        e = self.score(self.query(x)[RECEIVERS] - self.key(x)[SENDERS]).exp()
        return self.add(divide_by_sums(e, self.add, RECEIVERS, NODES) * self.value(x)[SENDERS], RECEIVERS, NODES)


class Pooling(nn.Module):
    """One row of weights for each graph, over the tokens that are no padding."""

    def __init__(self, add: Add, keeps_index: bool = True) -> None:
        super().__init__()
        self.score, self.add, self.keeps_index = nn.Linear(C, 1), add, keeps_index

    def forward(self, x: Tensor) -> Tensor:
        x = x[torch.arange(NODES - 2)] if self.keeps_index else x[torch.arange(2 * NODES - 4).view(2, -1)[0]]
        graphs = torch.arange(len(x)) % GRAPHS
        scores = self.score(x)
        e = (scores - self.add(scores, graphs, GRAPHS)[graphs]).exp()
        return self.add(divide_by_sums(e, self.add, graphs, GRAPHS) * x, graphs, GRAPHS)


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


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("divides_after", [False, True])
def test_attention_of_a_graph_with_added_scores_is_missed(name, divides_after):
    recording = record_module(GraphAttention(SUMS[name], divides_after), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]
    assert recording.missed[0].kernel == f"by hand: exp, mul and {name}"


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("scores_nodes", [False, True])
def test_attention_of_a_graph_with_scores_of_the_sender_alone_is_missed(name, scores_nodes):
    recording = record_module(SenderAttention(SUMS[name], scores_nodes), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]


@pytest.mark.parametrize("name", PICKS)
def test_attention_of_a_graph_whose_index_is_freed_is_missed(name):
    with torch.no_grad():  # a graph keeps the index
        recording = record_module(FreedIndexAttention(PICKS[name]), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]


@pytest.mark.parametrize("name", SUMS)
def test_attention_of_a_graph_with_a_weight_for_each_channel_is_missed(name):
    recording = record_module(VectorAttention(SUMS[name]), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0", EDGES)]


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("part", [Pooling, partial(Pooling, keeps_index=False), GaussianFilter])
def test_pooling_and_filters_by_an_index_are_no_attention(part, name):
    with torch.no_grad():
        recording = record_module(part(SUMS[name]), missing=False)
    assert not recording.calls
