"""Decoders that attend step by step, and pooling by a learned query, are recorded as the weights of each step."""

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


class Word(nn.Module):
    """Reads places of the encoder's outputs that it predicts: tutorials of translation in PyTorch had it in 2017."""

    def __init__(self, values: str) -> None:
        super().__init__()
        self.values = VALUES[values]
        self.embedding, self.dropout, self.attn = nn.Embedding(STEPS, C), nn.Dropout(0.1), nn.Linear(2 * C, T)
        self.attn_combine, self.gru = nn.Linear(2 * C, C), nn.GRU(C, C)

    def forward(self, word: Tensor, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.dropout(self.embedding(word).view(1, 1, -1))
        attn_weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        attn_applied = self.values(attn_weights, encoder_outputs.unsqueeze(0))
        output = self.attn_combine(torch.cat((embedded[0], attn_applied), 1)).unsqueeze(0)
        return self.gru(F.relu(output), hidden)[1], attn_weights


class Sentence(nn.Module):
    """The tutorial's translator as it was: one word of one sentence at a time, and outputs that a loop fills in."""

    def __init__(self, values: str) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(C, C), Word(values)

    def forward(self, x: Tensor) -> Tensor:
        encoded, state, weights = torch.zeros(T, C), torch.zeros(1, 1, C), []
        for place, token in enumerate(x):
            output, state = self.encoder(token.view(1, 1, -1), state)
            encoded[place] = output[0, 0]
        for word in range(STEPS):
            state, row = self.decoder(torch.tensor([[word]]), state, encoded)
            weights.append(row)
        return torch.cat(weights)


@pytest.mark.parametrize("values", VALUES)
def test_a_decoder_of_one_sentence_is_recorded_at_each_word(values):
    recording, weights = record_and_compare(Sentence(values).eval(), lambda m: m(torch.randn(T, C)))
    assert {call.name for call in recording.calls} == {"decoder"}
    check_steps(recording, weights[None])


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


class Window(nn.Module):
    """A mixture of windows that a decoder moves over the places of a text. https://arxiv.org/abs/1308.0850"""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], is_normalized: bool) -> None:
        super().__init__()
        self.cell, self.parameters_of_window, self.weigh = nn.LSTMCell(C, C), nn.Linear(C, 3 * MIXTURES), weigh
        self.is_normalized = is_normalized

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.mean(1)
        places, moved, outputs, rows = torch.arange(T), torch.zeros(B, MIXTURES), [], []
        for step in range(STEPS):
            h, c = self.cell(x[:, step], (h, c))
            size, width, by = self.parameters_of_window(h).exp().chunk(3, -1)
            moved = moved + by
            windows = size.unsqueeze(2) * torch.exp(-width.unsqueeze(2) * (moved.unsqueeze(2) - places) ** 2)
            weights = windows.sum(1)
            rows.append(weights / weights.sum(-1, keepdim=True) if self.is_normalized else weights)
            outputs.append(self.weigh(rows[-1], x))
        self.weights = torch.stack(rows, 1).detach()
        return torch.stack(outputs, 1)


@pytest.mark.parametrize(("values", "is_normalized"), [("bmm", False), ("einsum", True), ("sums", False)])
def test_windows_over_places_are_recorded_at_each_step(values, is_normalized):
    part = Window(VALUES[values], is_normalized)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    assert {call.kind for call in recording.calls} == {"self" if is_normalized else "implicit"}
    check_steps(recording, part.weights)


# Pooling: one row of weights of all tokens, by what a layer makes of each.


def divide(e: Tensor, dim: int) -> Tensor:
    return e / e.sum(dim, keepdim=True)


def fill_rows(m: "Pooling", x: Tensor) -> Tensor:
    joined = torch.zeros_like(x)
    for n in range(T):
        joined[:, n] = m.one(x[:, n])
    return joined


def collect_states(m: "Pooling", x: Tensor) -> Tensor:
    states = [x.new_zeros(len(x), C)]
    for token in x.unbind(1):
        states.append(m.cell(token, states[-1]))
    return torch.stack(states[1:], 1)


JOINS: dict[str, Callable[["Pooling", Tensor], Tensor]] = {  # tokens that the module itself joins
    "as they are": lambda m, x: x,
    "two sequences": lambda m, x: torch.cat([x, 2 * x.flip(1)], 1),
    "two layers of the tokens": lambda m, x: torch.cat([m.one(x), m.other(x)], 1),
    "a learned token and others": lambda m, x: torch.cat([m.first.expand(len(x), -1, -1), x], 1),
    "means of two layers": lambda m, x: torch.stack([m.one(x), m.other(x)], 1).mean(1),
    "states of a loop": collect_states,
    "tokens one by one": lambda m, x: torch.stack([m.one(x[:, n]) for n in range(T)], 1),
    "tokens one by one, kept as sequences": lambda m, x: torch.cat([m.one(token) for token in x.split(1, 1)], 1),
    "tokens written one by one": fill_rows,
    "a learned token and picked ones": lambda m, x: torch.stack([m.first[0].expand(len(x), -1), *x.unbind(1)], 1),
}
SOFTMAXES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": torch.softmax,
    "exponentials": lambda s, dim: divide(s.exp(), dim),
    "normalize": lambda s, dim: F.normalize(torch.exp(s - s.amax(dim, keepdim=True)), 1.0, dim),
    "logsumexp": lambda s, dim: torch.exp(s - torch.logsumexp(s, dim=dim).unsqueeze(dim)),
    "logarithms of sums": lambda s, dim: (s - s.exp().sum(dim, keepdim=True).log()).exp(),
    "a reciprocal": lambda s, dim: torch.mul((e := s.exp()).sum(dim, keepdim=True).add(1e-300).reciprocal(), e),
    "in place": lambda s, dim: (
        (e := s.sub(s.detach().amax(dim, keepdim=True)).exp_()) / e.sum(dim, keepdim=True).clamp(min=1e-9)
    ),
    "twice": lambda s, dim: torch.exp(s - s.max()) / torch.exp(s - s.max()).sum(dim, keepdim=True),
    "masked by a product": lambda s, dim: divide(s.exp() * torch.ones(s.shape[1:]), dim),
    "masked in place": lambda s, dim: divide(s.exp().masked_fill(torch.zeros(s.shape[1:]).bool(), 0), dim),
}


class Pooling(nn.Module):
    """Attention pooling; `weights` are those of the last forward, (b, h, 1, t)."""

    def __init__(self, join: str = "as they are", softmax: str = "softmax", is_product: bool = False) -> None:
        super().__init__()
        self.join, self.softmax, self.is_product, self.score = JOINS[join], SOFTMAXES[softmax], is_product, nn.Linear(C, 1)
        self.one, self.other, self.first, self.cell = (
            nn.Linear(C, C),
            nn.Linear(C, C),
            nn.Parameter(torch.randn(1, 1, C)),
            nn.GRUCell(C, C),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(self, x)
        weights = self.softmax(self.score(x.tanh()), 1)
        self.weights = weights.detach().mT.unsqueeze(1)
        return weights.mT @ x if self.is_product else (weights * x).sum(1)


@pytest.mark.parametrize(
    "part",
    [
        *(pytest.param(Pooling(join), id=join) for join in JOINS),
        *(pytest.param(Pooling(softmax=one, is_product=n % 2 == 0), id=one) for n, one in enumerate(SOFTMAXES)),
    ],
)
def test_tokens_are_pooled_whatever_joins_them_and_however_the_softmax_is_written(part):
    recording, _ = record_and_compare(part.double(), lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), part.weights, rtol=0, atol=EQUAL)


POOLED: dict[str, Callable[[nn.ModuleDict, Tensor], tuple[Tensor, Tensor]]] = {  # the weights (b, 1, t) and what they pool
    "by a learned query of zeros": lambda m, x: (
        w := (m["key"](x) @ torch.zeros(C)).softmax(-1).unsqueeze(1),
        torch.bmm(w, x),
    ),
    "by additive scores of zeros": lambda m, x: (
        w := m["line"](torch.tanh(m["key"](x) + m["query"](torch.zeros(1, C)).unsqueeze(1)))
        .squeeze(-1)
        .softmax(-1)
        .unsqueeze(1),
        torch.bmm(w, x),
    ),
    "instances of a bag": lambda m, x: (
        (w := m["line"](x[0]).squeeze(-1).softmax(0))[None, None],
        torch.tensordot(w, x[0], 1),
    ),
    "joined instances of a bag": lambda m, x: (
        (w := m["line"](y := torch.cat([x[0][torch.arange(T).flip(0)[:2]], x[0][:3]])).softmax(0)).mT[None],
        (w * y).sum(0),
    ),
}


@pytest.mark.parametrize("form", POOLED)
def test_pooling_by_a_learned_query_and_of_a_bag_is_recorded(form):
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"key": nn.Linear(C, C), "query": nn.Linear(C, C), "line": nn.Linear(C, 1)})

        def forward(self, x: Tensor) -> Tensor:
            weights, pooled = POOLED[form](self.parts, x)
            self.weights = weights.detach()
            return pooled

    part = Pool()
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(part, lambda m: m(x if "bag" not in form else x[:1]))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], part.weights, rtol=0, atol=EQUAL)
