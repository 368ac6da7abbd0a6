"""A row of weights that was predicted from other tokens than it multiplies reads these; one that was made of them pools."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, STEPS = 2, 7, 11, 5, 3

Weigh = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, Weigh] = {
    "bmm": lambda w, v: torch.bmm(w.unsqueeze(1), v).squeeze(1),
    "einsum": lambda w, v: torch.einsum("bt,btc->bc", w, v),
    "sums": lambda w, v: (w.unsqueeze(-1) * v).sum(1),
}


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
