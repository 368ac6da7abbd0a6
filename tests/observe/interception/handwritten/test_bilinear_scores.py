"""Scores of tokens with a matrix of weights between them, in one product or in two, are recorded as any others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

B, H, T, C, D = 2, 3, 5, 7, 4


def score_by_matmul(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    return x[:, None] @ weight @ y.mT[:, None]


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "two einsums": lambda x, weight, y: torch.einsum("bhie,bje->bhij", torch.einsum("bid,hde->bhie", x, weight), y),
    "two products": score_by_matmul,
}


class Bilinear(nn.Module):
    """Heads with a matrix of weights each, and an activation of the scores; values by heads, or the tokens themselves."""

    def __init__(self, score: str, activation: Callable[[Tensor], Tensor], has_heads: bool) -> None:
        super().__init__()
        self.score, self.activation, self.has_heads = SCORES[score], activation, has_heads
        self.weight, self.three = nn.Parameter(torch.randn(H, C, C)), nn.Linear(C, H * D)
        self.weights = torch.empty(0)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = x if context is None else context
        weights = self.activation(self.score(x, self.weight, y))
        self.weights = weights.detach()
        v = self.three(y).unflatten(-1, (H, -1)).transpose(1, 2) if self.has_heads else y[:, None]
        return (weights @ v).transpose(1, 2).flatten(2)


def compare_map(part: Bilinear, *inputs: Tensor) -> None:
    recording, _ = record_and_compare(part, lambda m: m(*inputs))
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), part.weights, rtol=0, atol=EQUAL)
    assert not recording.notes


@pytest.mark.parametrize("has_heads", [False, True])
@pytest.mark.parametrize("activation", [lambda s: s.softmax(-1), torch.relu, torch.sigmoid])
@pytest.mark.parametrize("score", SCORES)
def test_scores_with_a_matrix_between_tokens_keep_their_formula(score, activation, has_heads):
    part = Bilinear(score, activation, has_heads).double()
    compare_map(part, torch.randn(B, T, C, dtype=torch.float64))


class Pairs(nn.Module):
    """A bilinear layer, whose matrix is between the features of one token in two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(H, C, C)), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.einsum("btd,hde,bte->bth", x, self.weight, x)
        return torch.einsum("bth,btd->btd", pairs, x) + self.out(pairs)


def test_a_matrix_between_the_features_of_one_token_makes_no_scores():
    recording, _ = record_and_compare(nn.Sequential(Pairs()), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


class Raw(nn.Module):
    """Tokens weighed by their scores with a matrix of weights between them, without an activation: x W xᵀ x."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.weight, self.one = form, nn.Parameter(torch.randn(C, C)), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight)


RAW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two products": lambda x, weight: x @ weight @ x.mT @ x,
    "an einsum": lambda x, weight: torch.einsum("...ic,cd,...jd->...ij", x, weight, x) @ x,
    "an einsum with values": lambda x, weight: torch.einsum("...ic,cd,...jd,...je->...ie", x, weight, x, x),
    "an einsum of values first": lambda x, weight: torch.einsum("...je,cd,...jd,...ic->...ie", x, weight, x, x),
    "a layer": lambda x, weight: nn.functional.linear(x, weight.T) @ x.mT @ x,
}


def test_a_covariance_that_features_are_multiplied_with_is_no_attention():
    recording, _ = record_and_compare(
        Raw(lambda x, weight: x @ weight @ (x.mT @ x)).double(), lambda m: m(torch.randn(B, T, C).double())
    )
    assert not recording.calls
