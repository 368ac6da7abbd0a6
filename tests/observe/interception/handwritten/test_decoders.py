"""Decoders that attend step by step are recorded as the weights of each step."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard import Recording

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, STEPS, MIXTURES = 2, 7, 6, 4, 3
VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of weights (b, t) and values (b, t, c)
    "bmm": lambda w, v: torch.bmm(w.unsqueeze(1), v).squeeze(1),
    "einsum": lambda w, v: torch.einsum("bt,btc->bc", w, v),
    "sums": lambda w, v: (w.unsqueeze(-1) * v).sum(1),
}
STARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(len(x), C),
    "zeros_like": lambda x: torch.zeros_like(x[:, 0]),
    "new_zeros": lambda x: x.new_zeros(len(x), C),
    "the mean": lambda x: x.mean(1),
}


class Score(nn.Module):
    """Scores (b, t) of keys (b, t, c) by a state (b, c), of one form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.query, self.keys, self.line = form, nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, 1)
        self.joined, self.compared = nn.Linear(2 * C, C), nn.Linear(4 * C, C)

    def forward(self, state: Tensor, keys: Tensor) -> Tensor:
        repeated = state.unsqueeze(1).expand_as(keys)
        if self.form == "added":
            return self.line(torch.tanh(self.keys(keys) + self.query(state).unsqueeze(1))).squeeze(-1)
        if self.form == "expanded and added":
            return self.line(torch.tanh(self.query(state).unsqueeze(1).expand(-1, T, -1) + self.keys(keys))).squeeze(-1)
        if self.form == "repeated and joined":
            return self.line(torch.tanh(self.joined(torch.cat([state.unsqueeze(1).repeat(1, T, 1), keys], 2)))).squeeze(-1)
        if self.form == "expanded and joined":
            return self.line(torch.tanh(self.joined(torch.cat([keys, repeated], -1)))).squeeze(-1)
        if self.form == "joined with more":  # https://arxiv.org/abs/1706.06978
            joined = torch.cat([repeated, keys, repeated - keys, repeated * keys], -1)
            return self.line(self.compared(joined).sigmoid()).squeeze(-1)
        if self.form == "a product":  # https://arxiv.org/abs/1508.04025
            return torch.bmm(self.keys(keys), state.unsqueeze(2)).squeeze(2)
        assert self.form == "a product by einsum"
        return torch.einsum("bkd,bd->bk", self.keys(keys), state)


class Decoder(nn.Module):
    """Words that a state predicts one by one; `weights` are those of its last forward, (b, steps, t)."""

    def __init__(self, form: str, values: str, start: str) -> None:
        super().__init__()
        self.score, self.cell, self.values, self.start = Score(form), nn.GRUCell(C, C), VALUES[values], STARTS[start]

    def forward(self, x: Tensor) -> Tensor:
        state, rows, states = self.start(x), [], []
        for _ in range(STEPS):
            rows.append(self.score(state, x).softmax(-1))
            state = self.cell(self.values(rows[-1], x), state)
            states.append(state)
        self.weights = torch.stack(rows, 1).detach()
        return torch.stack(states, 1)


FORMS = [
    *("added", "expanded and added", "repeated and joined", "expanded and joined", "joined with more"),
    *("a product", "a product by einsum"),
]


def check_steps(recording: Recording, weights: Tensor) -> None:
    rows = torch.cat([call.map.dense() for call in recording.calls], 2)
    torch.testing.assert_close(rows.squeeze(1), weights, rtol=0, atol=EQUAL)


@pytest.mark.parametrize(
    ("values", "start"), [("bmm", "zeros"), ("einsum", "zeros_like"), ("sums", "new_zeros"), ("bmm", "the mean")]
)
@pytest.mark.parametrize("form", FORMS)
def test_each_step_of_a_decoder_is_recorded_also_the_first_whose_state_is_zeros(form, values, start):
    decoder = Decoder(form, values, start)
    recording, _ = record_and_compare(nn.Sequential(decoder), lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == STEPS
    check_steps(recording, decoder.weights)


class LocationAttention(nn.Module):
    """Scores from a query, keys and features of the weights of the step before. https://arxiv.org/abs/1506.07503"""

    def __init__(self, add: Callable[[Tensor, Tensor, Tensor], Tensor], has_first: bool) -> None:
        super().__init__()
        self.query, self.keys, self.score, self.cell = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, 1), nn.GRUCell(C, C)
        self.convolution, self.place = nn.Conv1d(1, 2, 3, padding=1), nn.Sequential(nn.Linear(2, C))
        self.add, self.has_first = add, has_first

    def forward(self, x: Tensor) -> Tensor:
        state, rows = x.mean(1), []
        weights = x.new_zeros(x.shape[:2]) if self.has_first else torch.full(x.shape[:2], 1 / T)
        for _ in range(STEPS):
            places = self.place(self.convolution(weights.unsqueeze(1)).mT)
            weights = (
                self.score(torch.tanh(self.add(self.query(state).unsqueeze(1), self.keys(x), places))).squeeze(-1).softmax(-1)
            )
            rows.append(weights)
            state = self.cell(torch.bmm(weights.unsqueeze(1), x).squeeze(1), state)
        self.weights = torch.stack(rows, 1).detach()
        return state


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(
    "add",
    [lambda q, k, p: k + q + p, lambda q, k, p: q + p + k, lambda q, k, p: k + p + q, lambda q, k, p: p + (q + k)],
    ids=["keys and query first", "query and places first", "keys and places first", "places last"],
)
def test_scores_that_depend_on_the_weights_before_are_recorded_at_each_step(add, has_first):
    part = LocationAttention(add, has_first)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    check_steps(recording, part.weights)


@pytest.mark.parametrize("score", [lambda h, k: torch.sum(h * k, 2), lambda h, k: torch.einsum("qbc,kbc->kb", h, k)])
def test_the_sentences_of_a_decoder_with_a_state_of_one_layer_are_a_batch_and_no_heads(score):
    class Luong(nn.Module):
        def forward(self, state: Tensor, keys: Tensor) -> Tensor:  # (1, b, c) and (t, b, c), as in PyTorch's tutorials
            self.weights = F.softmax(score(state, keys).t(), dim=1).unsqueeze(1)
            return self.weights.bmm(keys.transpose(0, 1))

    part = Luong()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(1, 3, C), torch.randn(T, 3, C)))
    check_steps(recording, part.weights)
