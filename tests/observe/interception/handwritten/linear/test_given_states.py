"""Chunks of tokens that are calls of a module, which is given the state of the chunks before."""

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.linear.chunked_attention import SINGLE
from regard.observe.interception.handwritten.linear.given_states import READ_STATE

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, N, C, D = 2, 13, 5, 6, 4


def add(inside: Tensor, q: Tensor, state: Tensor, reach: Tensor) -> Tensor:
    return inside + (q @ state) * reach


def add_in_place(inside: Tensor, q: Tensor, state: Tensor, reach: Tensor) -> Tensor:
    inside += torch.einsum("bid,bde->bie", q * reach, state)
    return inside


def add_fused(inside: Tensor, q: Tensor, state: Tensor, reach: Tensor) -> Tensor:
    return torch.baddbmm(inside, q * reach, state)


class Retention(nn.Module):
    """One head of RetNet's chunkwise form, with a state that is passed from call to call. https://arxiv.org/abs/2307.08621"""

    def __init__(self, join, gamma: float) -> None:
        super().__init__()
        self.join, self.gamma = join, gamma
        self.q, self.k, self.v = (nn.Linear(C, D) for _ in range(3))
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        places = torch.arange(x.shape[1])
        decays = (self.gamma ** (places[:, None] - places).clamp(min=0)).tril()
        weights = (q @ k.mT) * decays
        self.weights.append(weights.detach())
        left = k.mT @ (v * decays[-1].unsqueeze(-1)) + state * self.gamma ** len(places)
        return self.join(weights @ v, q, state, self.gamma ** (places.unsqueeze(-1) + 1.0)), left


class Chunks(nn.Module):
    """A loop over chunks, each of which is a call of the same module."""

    def __init__(self, join, gamma: float) -> None:
        super().__init__()
        self.layer = Retention(join, gamma)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros(len(x), D, D), []
        for part in x.split(N, 1):
            output, state = self.layer(part, state)
            outputs.append(output)
        return torch.cat(outputs, 1)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
@pytest.mark.parametrize("join", [add, add_in_place, add_fused])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_note_says_that_the_map_of_a_chunk_is_without_the_state(join, gamma, has_gradients):
    model, x = Chunks(join, gamma), torch.randn(B, T, C)
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(nn.Sequential(model), lambda m: m(x))
    for call, weights in zip(recording.calls, model.layer.weights[-3:], strict=True):
        assert_equal(call.map.dense(), weights.unsqueeze(1))
    assert [one.partition(": ")[2] for one in recording.notes] == [READ_STATE]


@pytest.mark.parametrize("join", [add, add_in_place, add_fused])
def test_a_note_says_so_of_a_chunk_that_an_intervention_changes(join):
    model, x = nn.Sequential(Chunks(join, 1.0)), torch.randn(B, T, C)
    with torch.no_grad(), regard.intervene(model, regard.KnockOut(kind="implicit")), regard.record(model) as recording:
        model(x)
    assert [one.partition(": ")[2] for one in recording.notes] == [READ_STATE]


@pytest.mark.parametrize("other", ["no chunk before", "a layer", "attention to a memory"])
def test_no_note_says_so_of_other_sums(other):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.layer = nn.Linear(C, 2 * D), nn.Linear(C, C)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            q, k = self.project(x).relu().chunk(2, -1)
            inside = (q @ k.mT).tril() @ x
            if other == "a layer":
                return inside + memory @ self.layer.weight
            if other == "attention to a memory":
                return inside + (x @ memory.mT).softmax(-1) @ memory
            return inside + x @ memory

    memory = torch.zeros(B, C, C) if other == "no chunk before" else torch.randn(B, T, C)
    with regard.record(model := Sum(), keep="values") as recording:
        model(torch.randn(B, T, C), memory)
    assert "implicit" in {call.kind for call in recording.calls}
    assert not [one for one in recording.notes if READ_STATE in one]


class Held(Retention):
    """A retention that keeps its state from call to call itself."""

    def forward(self, x: Tensor) -> Tensor:
        output, self.state = super().forward(x, self.state)
        return output


def test_a_note_says_so_of_a_state_that_a_module_holds():
    model, x = Held(add, 0.9), torch.randn(B, N, C)
    recording, _ = record_and_compare(model, lambda m: (setattr(m, "state", torch.randn(B, D, D)), m(x))[1])
    assert_equal(recording.map(0, kind="implicit").dense(), model.weights[-1].unsqueeze(1))
    assert [one.partition(": ")[2] for one in recording.notes] == [READ_STATE]


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("join", [add, add_in_place, add_fused])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_step_of_one_token_from_a_state_is_missed_with_this_reason(join, b, is_held):
    x, state = torch.randn(b, 1, C), torch.randn(b, D, D)

    def run(model: nn.Module) -> Tensor:
        if not is_held:
            return model(x, state)[0]
        model.state = state
        return model(x)

    recording, _ = record_and_compare(Held(join, 0.9) if is_held else Retention(join, 0.9), run, missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [SINGLE]


class Causal(nn.Module):
    """Causal linear attention without any state."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(C, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT).tril() @ self.v(x)


@pytest.mark.parametrize("b", [1, 2])
def test_the_reason_does_not_say_that_a_call_of_one_token_has_a_state(b):
    recording, _ = record_and_compare(Causal(), lambda m: m(torch.randn(b, 1, C)), missing=True)
    assert not recording.calls
    assert ["may be added to it from a state" in one.reason for one in recording.missed] == [True]
