"""Sums of edges by a matrix of zeros and ones are missed, wherever it was made; one-hot tokens are tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.handwritten_call import UNFOLLOWED
from regard.observe.interception.handwritten.softmax.edge_call import EDGE_KEYS
from regard.observe.recording import Recording

NODES, EDGE_COUNT, C, D = 11, 37, 12, 5
SENDERS, RECEIVERS = torch.randint(NODES, (2, EDGE_COUNT), generator=torch.Generator().manual_seed(3))


ORIGINS = ["made inside", "a buffer", "an argument", "rows of a buffer"]  # of matrices of zeros and ones


class OneHotIndex(nn.Module):
    """Has the index of a graph as matrices of zeros and ones, which it makes or is given."""

    def __init__(self, origin: str) -> None:
        super().__init__()
        self.origin = origin
        for name, index in (("senders", SENDERS), ("receivers", RECEIVERS)):
            self.register_buffer(name, F.one_hot(index, NODES).to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("rows", torch.eye(NODES), persistent=False)

    def get_matrix(self, index: Tensor) -> Tensor:
        if self.origin == "made inside":
            return F.one_hot(index, NODES).to(self.senders.dtype)
        if self.origin == "rows of a buffer":
            return self.rows[index.tolist()]
        if self.origin == "an argument":
            return self.given[0 if index is SENDERS else 1]
        return self.senders if index is SENDERS else self.receivers


class GivenIndex(nn.Module):
    """Gives a module the matrices of a graph."""

    def __init__(self, part: OneHotIndex) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, self.part.senders, self.part.receivers)


class OneHotAttention(OneHotIndex):
    """The index of a graph is a matrix of zeros and ones, whose products pick entries or sum them."""

    def __init__(self, picks: bool, sums: bool, scores: bool, origin: str) -> None:
        super().__init__(origin)
        self.project, self.score, self.picks, self.sums, self.scores = nn.Linear(C, D), nn.Linear(C, 1), picks, sums, scores

    def pick(self, x: Tensor, index: Tensor, by_product: bool) -> Tensor:
        return torch.einsum("en,nd->ed", self.get_matrix(index), x) if by_product else x[index]

    def add(self, x: Tensor) -> Tensor:
        return self.get_matrix(RECEIVERS).mT @ x if self.sums else x.new_zeros(NODES, *x.shape[1:]).index_add(0, RECEIVERS, x)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        self.given = given
        sent, received = self.score(x), self.score(x).square()
        e = (self.pick(sent, SENDERS, self.scores) + self.pick(received, RECEIVERS, self.scores)).exp()
        weights = e / self.pick(self.add(e), RECEIVERS, self.picks)
        return self.add(weights * self.pick(self.project(x), SENDERS, self.picks))


class OneHotSums(OneHotIndex):
    """A matrix of zeros and ones sums the exponentials, (edges,) or (edges, 1), and the weighted values."""

    def __init__(self, score: str, keepdim: bool, divides_first: bool, origin: str) -> None:
        super().__init__(origin)
        self.query, self.key, self.value, self.of_sum = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D), nn.Linear(D, 1)
        self.of_both, self.score, self.keepdim, self.divides_first = nn.Linear(2 * D, 1), score, keepdim, divides_first

    def compute_scores(self, x: Tensor) -> Tensor:
        q, k = self.query(x)[RECEIVERS], self.key(x)[SENDERS]
        if self.score == "product":
            return (q * k).sum(-1)
        if self.score == "joined":
            return F.leaky_relu(self.of_both(torch.cat([q, k], -1))).squeeze(-1)
        return self.of_sum(torch.tanh(q + k)).squeeze(-1)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        self.given = given
        index, e = self.get_matrix(RECEIVERS), self.compute_scores(x).exp()
        e = e[:, None] if self.keepdim else e
        z = index.T @ e
        columns = e if self.keepdim else e[:, None]
        if self.divides_first:
            return index.T @ (columns / z.view(-1, 1)[RECEIVERS] * self.value(x)[SENDERS])
        return index.T @ (columns * self.value(x)[SENDERS]) / z.view(-1, 1)


def give_index(part: OneHotIndex) -> tuple[nn.Module, str]:
    """Return a module that attends as a part of it does, and the name of the part in a model."""
    return (GivenIndex(part), "0.part") if part.origin == "an argument" else (part, "0")


def record_module(module: nn.Module) -> Recording:
    return record_and_compare(nn.Sequential(module), lambda m: m(torch.randn(NODES, C)), missing=True)[0]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("picks", [False, True])
def test_sums_by_a_matrix_of_zeros_and_ones_are_missed(picks, scores, origin):
    model, name = give_index(OneHotAttention(picks, True, scores, origin))
    recording = record_module(model)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [(name, UNFOLLOWED)]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("scores", [False, True])
def test_values_that_a_matrix_of_zeros_and_ones_picks_are_those_of_edges(scores, origin):
    model, _ = give_index(OneHotAttention(True, False, scores, origin))
    recording, _ = record_and_compare(nn.Sequential(model), lambda m: m(torch.randn(NODES, C)))
    (call,), (note,) = recording.calls, recording.notes
    assert EDGE_KEYS in note
    assert call.map.shape == (1, 1, NODES, EDGE_COUNT)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("divides_first", [False, True])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("score", ["product", "joined", "sum"])
def test_sums_of_exponentials_by_a_matrix_of_zeros_and_ones_are_no_call(score, keepdim, divides_first, origin):
    model, name = give_index(OneHotSums(score, keepdim, divides_first, origin))
    recording = record_module(model)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [(name, UNFOLLOWED)]


class OneHotTokens(nn.Module):
    """Queries attend to one-hot tokens, which another module has made, or one-hot queries to tokens."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.query, self.key, self.value = style, nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, one_hot: Tensor, tokens: Tensor) -> Tensor:
        if self.style == "self":
            q, k, v = self.query(one_hot), one_hot, self.value(one_hot)
        elif self.style == "keys":
            q, k, v = self.query(tokens), one_hot, one_hot
        else:
            q, k, v = one_hot, self.key(tokens), self.value(tokens)
        self.weights = (q @ k.mT).softmax(-1)
        return self.weights @ v


@pytest.mark.parametrize("style", ["self", "keys", "queries"])
def test_one_hot_tokens_that_a_module_is_given_are_no_index(style):
    tokens = F.one_hot(torch.arange(2 * NODES).view(2, -1) % C, C).double(), torch.randn(2, NODES + 2, C).double()
    recording, _ = record_and_compare(model := OneHotTokens(style).double(), lambda m: m(*tokens))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], model.weights.detach(), rtol=1e-12, atol=1e-12)
    assert not recording.notes


class OneHotMemory(nn.Module):
    """Running sums of products of keys with values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("btd,btde->bte", q, torch.einsum("btd,bte->btde", k, v).cumsum(1))


def test_outer_products_with_one_hot_keys_are_written_to_a_memory():
    q, v = torch.randn(2, 2, NODES, C).double()
    k = F.one_hot(torch.arange(2 * NODES).view(2, -1) % C, C).double()
    recording, _ = record_and_compare(nn.Sequential(OneHotMemory()), lambda m: m[0](q, k, v))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense()[:, 0], (q @ k.mT).tril(), rtol=1e-12, atol=1e-12)
