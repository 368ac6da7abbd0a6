"""Scores that a loop computes pair by pair and joins in a list are recorded as their softmax, or missed with a reason."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.interception.handwritten.handwritten_call import UNFOLLOWED

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 5, 11, 7


class Scorer(nn.Module):
    """Ways to score a token a beside a token b, of which each is (..., D)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.network = nn.Sequential(nn.Linear(2 * D, D), nn.Tanh(), nn.Linear(D, 1))
        self.line, self.vector = nn.Linear(2 * D, 1, bias=False), nn.Parameter(torch.randn(D))
        self.one, self.other = nn.Linear(D, 1), nn.Linear(D, 1)

    def score_by_network(self, a: Tensor, b: Tensor) -> Tensor:
        return self.network(torch.cat([a, b], -1))

    def score_by_line(self, a: Tensor, b: Tensor) -> Tensor:
        return F.leaky_relu(self.line(torch.cat([a, b], dim=-1)))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (torch.tanh(self.first(a) + self.second(b)) @ self.vector).unsqueeze(-1)

    def add_numbers(self, a: Tensor, b: Tensor) -> Tensor:
        return F.leaky_relu(self.one(a) + self.other(b))


SCORES = ["score_by_network", "score_by_line", "add", "add_numbers"]


class RowByRow(nn.Module):
    """A list of scores for each token; what becomes of it is up to `join`."""

    def __init__(self, score: str, join: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.project, self.scorer, self.score, self.join = nn.Linear(C, D), Scorer(), score, join

    def forward(self, x: Tensor) -> Tensor:
        h, score = self.project(x), getattr(self.scorer, self.score)
        rows = [self.join([score(h[i], h[j]) for j in range(len(h))]).flatten() for i in range(len(h))]
        self.weights = torch.stack(rows).detach()
        return torch.stack([row @ h for row in rows])


def exponentiate_each(scores: list[Tensor]) -> Tensor:
    e = torch.stack([one.exp() for one in scores])
    return e / e.sum()


JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "cat": lambda scores: torch.cat(scores).softmax(0),
    "stack": lambda scores: F.softmax(torch.stack(scores), dim=0),
    "stack of numbers": lambda scores: torch.stack([one.squeeze() for one in scores]).softmax(-1),
    "exponentials of all": lambda scores: (e := torch.cat(scores).exp()) / e.sum(),
    "exponentials of each": exponentiate_each,
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("join", JOINS)
def test_a_list_of_scores_of_each_token_is_recorded_row_by_row(score, join):
    part = RowByRow(score, JOINS[join])
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(T, C)))
    found = torch.cat([call.map.dense()[0, 0] for call in recording.calls])
    torch.testing.assert_close(found, part.weights, rtol=0, atol=EQUAL)


class AllPairs(RowByRow):
    """One list of the scores of all pairs, whose softmax weighs the values at once or key by key."""

    def __init__(self, score: str, loops_over_keys: bool = False) -> None:
        super().__init__(score, torch.cat)
        self.loops_over_keys = loops_over_keys

    def forward(self, x: Tensor) -> Tensor:
        h, score = self.project(x), getattr(self.scorer, self.score)
        t = h.shape[-2]
        scores = torch.cat([score(h[..., i, :], h[..., j, :]) for i in range(t) for j in range(t)], -1)
        weights = scores.unflatten(-1, (t, t)).softmax(-1)
        self.weights = weights.detach()
        if self.loops_over_keys:
            return sum(weights[..., j, None] * h[..., None, j, :] for j in range(t))
        return weights @ h


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shape", [(T, C), (B, T, C)])
@pytest.mark.parametrize("loops_over_keys", [False, True])
def test_a_list_of_the_scores_of_all_pairs_is_recorded_as_a_matrix(score, shape, loops_over_keys):
    part = AllPairs(score, loops_over_keys)
    recording, context = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(shape)), keep="values")
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense()[:, 0], part.weights.view(-1, T, T), rtol=0, atol=EQUAL)
    found = (call.map.dense() @ recording.values(0)).view(context.shape)
    torch.testing.assert_close(found, context, rtol=0, atol=EQUAL)


class AddedUp(RowByRow):
    """Exponentials that a loop adds up, with the values times these or after their division."""

    def __init__(self, score: str, style: str) -> None:
        super().__init__(score, torch.cat)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        h, score, rows = self.project(x), getattr(self.scorer, self.score), []
        for one in (h[i] for i in range(len(h))):
            e = [score(one, h[j]).exp() for j in range(len(h))]
            if self.style == "sums":
                rows.append(sum(weight * value for weight, value in zip(e, h, strict=True)) / sum(e))
                continue
            if self.style == "each divided":
                total = sum(e)
                rows.append(sum(weight / total * value for weight, value in zip(e, h, strict=True)))
                continue
            if self.style == "into rows":
                numerators, denominators = torch.zeros(1, D), torch.zeros(1)
                for weight, value in zip(e, h, strict=True):
                    numerators[0] += weight * value
                    denominators[0] += weight.squeeze()
                rows.append((numerators / denominators.unsqueeze(-1).clamp(min=1e-300))[0])
                continue
            numerator, denominator = torch.zeros(D), torch.zeros(1)
            for weight, value in zip(e, h, strict=True):
                if self.style == "in place":
                    numerator += weight * value
                    denominator += weight
                else:
                    numerator, denominator = numerator + weight * value, denominator + weight
            rows.append(numerator / (denominator + 1e-9) if self.style == "with an epsilon" else numerator / denominator)
        return torch.stack(rows)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("style", ["sums", "each divided", "in place", "out of place", "with an epsilon", "into rows"])
def test_sums_of_exponentials_that_a_loop_adds_up_are_missed(score, style):
    recording, _ = record_and_compare(AddedUp(score, style), lambda m: m(torch.randn(T, C)), missing=True)
    assert {one.reason for one in recording.missed} == {UNFOLLOWED}


class Gated(RowByRow):
    """Sigmoids of the scores of a list of neighbors, which gate what is summed."""

    def __init__(self, score: str, multiplies: bool) -> None:
        super().__init__(score, torch.cat)
        self.multiplies = multiplies

    def forward(self, x: Tensor) -> Tensor:
        h, score, rows, self.weights = self.project(x), getattr(self.scorer, self.score), [], []
        for i in range(len(h)):
            neighbors = [j for j in range(len(h)) if j != i]
            gates = torch.stack([torch.sigmoid(score(h[i], h[j])) for j in neighbors])
            self.weights.append(gates.flatten().detach())
            values = torch.stack([h[j] for j in neighbors])
            rows.append((gates.mT @ values).squeeze(0) if self.multiplies else (gates * values).sum(0))
        return torch.stack(rows)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("multiplies", [False, True])
def test_gates_of_the_neighbors_of_each_token_are_recorded_row_by_row(score, multiplies):
    part = Gated(score, multiplies)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(T, C)))
    assert {call.kind for call in recording.calls} == {"implicit"}
    for call, weights in zip(recording.calls, part.weights, strict=True):
        torch.testing.assert_close(call.map.dense()[0, 0, 0], weights, rtol=0, atol=EQUAL)


class Decoder(nn.Module):
    """A state that reads all tokens at each step, with a list of their scores. https://arxiv.org/abs/1409.0473"""

    def __init__(self, score: str, squeezes: bool) -> None:
        super().__init__()
        self.project, self.cell, self.scorer = nn.Linear(C, D), nn.GRUCell(D, D), Scorer()
        self.score, self.squeezes = score, squeezes

    def forward(self, x: Tensor) -> Tensor:
        h, score, self.weights = self.project(x), getattr(self.scorer, self.score), []
        state = torch.zeros_like(h[:, 0])
        for _ in range(3):
            state = self.cell(h.mean(1), state)
            energies = [score(state, h[:, j]) for j in range(h.shape[1])]
            if self.squeezes:
                weights = torch.stack([one.squeeze(-1) for one in energies], 1).softmax(-1)
            else:
                weights = torch.cat(energies, dim=1).softmax(dim=1)
            self.weights.append(weights.detach())
            state = state + torch.bmm(weights.unsqueeze(1), h).squeeze(1)
        return state


@pytest.mark.parametrize("score", ["score_by_network", "score_by_line", "add"])
@pytest.mark.parametrize("squeezes", [False, True])
def test_a_decoder_that_scores_one_token_after_the_other_is_recorded_at_each_step(score, squeezes):
    part = Decoder(score, squeezes)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 3
    for call, weights in zip(recording.calls, part.weights, strict=True):
        torch.testing.assert_close(call.map.dense()[:, 0, 0], weights, rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Lists of single numbers that are no scores of keys, or that weigh no values."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.scorer = style, nn.Linear(C, D), Scorer()
        self.cell, self.head, self.classes = nn.RNNCell(D, D), nn.Linear(D, 1), nn.Linear(2 * D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, state = self.project(x), torch.zeros(B, D)
        if self.style == "regression":
            outputs = []
            for t in range(T):
                state = self.cell(h[:, t], state)
                outputs.append(self.head(state))
            return torch.cat(outputs, 1).sigmoid()
        if self.style == "recurrence":
            outputs = []
            for t in range(T):
                state = torch.tanh(h[:, t] + self.scorer.first(state))
                outputs.append(state[0])
            return torch.stack(outputs).softmax(-1) @ h[0].mT
        if self.style == "pooling":
            scores = torch.cat([self.head(h[:, t].tanh()) for t in range(T)], 1)
            return (scores.softmax(-1).unsqueeze(1) @ h).squeeze(1)
        if self.style == "pairs of classes":
            return torch.stack([self.classes(torch.cat([h[0, i], h[0, j]])) for i in range(T) for j in range(i)]).softmax(-1)
        assert self.style == "links"
        return torch.cat([self.scorer.score_by_network(h[0, i], h[0, j]) for i in range(T) for j in range(i)]).sigmoid()


@pytest.mark.parametrize("style", ["regression", "recurrence", "pooling", "pairs of classes", "links"])
def test_other_lists_of_numbers_are_no_attention(style):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


class Nested(nn.Module):
    """A softmax of scores beside tensors that are nested."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[0], x[1, :2]])
        torch.cat([rows, rows])
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_joined_change_nothing():
    recording, _ = record_and_compare(Nested(), lambda m: m(torch.randn(B, T, D)))
    assert len(recording.calls) == 1


class Restacked(nn.Module):
    """Values that were cut into tokens and joined again."""

    def forward(self, x: Tensor) -> Tensor:
        v = torch.cat([x[:2], x[2:]])
        return (x @ x.mT).softmax(-1) @ torch.stack(v.unbind(0))


def test_tokens_that_are_joined_again_are_no_scores():
    recording, _ = record_and_compare(Restacked(), lambda m: m(torch.randn(T, D)))
    assert len(recording.calls) == 1
