"""A row of weights that was predicted from other tokens than it multiplies reads these; one that was made of them pools."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, STEPS = 2, 7, 11, 5, 3

Weigh = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, Weigh] = {
    "bmm": lambda w, v: torch.bmm(w.unsqueeze(1), v).squeeze(1),
    "einsum": lambda w, v: torch.einsum("bt,btc->bc", w, v),
    "sums": lambda w, v: (w.unsqueeze(-1) * v).sum(1),
}


class Step(nn.Module):
    """A decoder that reads places of its encoder's outputs: tutorials of translation in PyTorch had it in 2017."""

    def __init__(self, weigh: Weigh, projects: bool = False) -> None:
        super().__init__()
        self.attn, self.combine, self.cell, self.weigh = nn.Linear(2 * C, T), nn.Linear(2 * C, C), nn.GRUCell(C, C), weigh
        self.project = nn.Linear(C, C) if projects else nn.Identity()

    def forward(self, word: Tensor, state: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.softmax(self.attn(torch.cat((word, state), 1)), dim=1)
        read = self.weigh(weights, self.project(encoded))
        return self.cell(F.relu(self.combine(torch.cat((word, read), 1))), state), weights


class Translator(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(C, C, batch_first=True), step

    def forward(self, x: Tensor) -> Tensor:
        encoded, state = self.encoder(x)
        state, weights = state[0], []
        for step in range(STEPS):
            state, found = self.decoder(x[:, step], state, encoded)
            weights.append(found)
        return torch.stack(weights, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("projects", [False, True])
def test_weights_of_places_that_a_decoder_predicts_are_recorded_at_each_step(way, projects):
    model = Translator(Step(WAYS[way], projects))
    recording, weights = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert {call.name for call in recording.calls} == {"decoder"}
    found = torch.cat([call.map.dense()[:, 0] for call in recording.calls], 1)
    torch.testing.assert_close(found, weights, rtol=0, atol=EQUAL)


class Sentence(nn.Module):
    """The decoder of the tutorial as it was: one word of one sentence at a time, and outputs that a loop fills in."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(C, C), Word()

    def forward(self, x: Tensor) -> Tensor:
        encoded, state, weights = torch.zeros(T, C), torch.zeros(1, 1, C), []
        for place, token in enumerate(x):
            output, state = self.encoder(token.view(1, 1, -1), state)
            encoded[place] = output[0, 0]
        for word in range(STEPS):
            state, found = self.decoder(torch.tensor([[word]]), state, encoded)
            weights.append(found)
        return torch.cat(weights)


class Word(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.attn = nn.Embedding(STEPS, C), nn.Dropout(0.1), nn.Linear(2 * C, T)
        self.attn_combine, self.gru = nn.Linear(2 * C, C), nn.GRU(C, C)

    def forward(self, word: Tensor, hidden: Tensor, encoder_outputs: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.dropout(self.embedding(word).view(1, 1, -1))
        attn_weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        attn_applied = torch.bmm(attn_weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = self.attn_combine(torch.cat((embedded[0], attn_applied[0]), 1)).unsqueeze(0)
        return self.gru(F.relu(output), hidden)[1], attn_weights


def test_a_decoder_of_one_sentence_is_recorded_at_each_word():
    model = Sentence().eval()
    recording, weights = record_and_compare(model, lambda m: m(torch.randn(T, C)))
    assert {call.name for call in recording.calls} == {"decoder"}
    found = torch.cat([call.map.dense()[0, 0] for call in recording.calls])
    torch.testing.assert_close(found, weights, rtol=0, atol=EQUAL)


class Combine(nn.Module):
    """Outputs of experts, weighted with a router's scores or by a gate of other arguments."""

    def __init__(self, mix: Weigh, has_gate: bool) -> None:
        super().__init__()
        self.mix, self.gate = mix, nn.Linear(2 * C, 3) if has_gate else None

    def forward(self, outputs: Tensor, *inputs: Tensor) -> Tensor:
        scores = inputs[0] if self.gate is None else self.gate(torch.cat(inputs, -1))
        return self.mix(scores.softmax(-1), outputs)


class Experts(nn.Module):
    def __init__(self, mix: Weigh, has_gate: bool, is_joined: bool, is_pooled: bool) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 3), nn.ModuleList(nn.Linear(C, D) for _ in range(3))
        self.at_once, self.combine = nn.Linear(C, 3 * D), Combine(mix, has_gate)
        self.has_gate, self.is_joined, self.is_pooled = has_gate, is_joined, is_pooled

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1) if self.is_pooled else x
        joined = torch.stack([expert(x) for expert in self.experts], -2)
        outputs = joined if self.is_joined else self.at_once(x).unflatten(-1, (3, D))
        return self.combine(outputs, *((x, x.sin()) if self.has_gate else (self.router(x),)))


MIXES: dict[str, Weigh] = {
    "matmul": lambda w, v: (w.unsqueeze(-2) @ v).squeeze(-2),
    "einsum": lambda w, v: torch.einsum("...e,...ed->...d", w, v),
    "sums": lambda w, v: (w.unsqueeze(-1) * v).sum(-2),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("has_gate", "is_joined", "is_pooled"),
    [
        *[(False, False, False), (False, True, False), (False, False, True), (False, True, True)],
        *[(True, False, False), (True, True, False), (True, True, True)],
    ],
)
def test_a_module_that_combines_experts_is_no_attention(mix, has_gate, is_joined, is_pooled):
    model = Experts(MIXES[mix], has_gate, is_joined, is_pooled)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


class ChosenExperts(nn.Module):
    """Rows of weights that choose among outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(C, 3)
        self.layers = nn.ModuleList(nn.Linear(C, D) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        branches = torch.stack([layer(x.mean(1)) for layer in self.layers], 1)
        return self.gate(y.mean(1)).softmax(-1).unsqueeze(1) @ branches


def test_experts_that_another_input_chooses_are_no_attention():
    run = lambda m: m(torch.randn(B, T, C), torch.randn(B, T, C))  # noqa: E731
    recording, _ = record_and_compare(ChosenExperts(), run)
    assert not recording.calls
