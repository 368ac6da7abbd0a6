"""A normalizer that a loop or chunks divide by after the read is no part of the map, and a note says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.ancestors.later_divisors import LATER

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, D, CHUNK = 2, 12, 5, 3


class NormalizedAttention(nn.Module):
    """Linear attention whose rows are divided by the sums of their weights, or by nothing, or by the norm of the outputs."""

    def __init__(self, form: str, divides: str) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.form, self.divides = form, divides

    def divide(self, outputs: Tensor, sums: Tensor) -> Tensor:
        if self.divides == "norm":
            return outputs / outputs.square().mean(-1, keepdim=True).sqrt()
        return outputs / (sums + 1e-6) if self.divides == "sums" else outputs

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.query(x)) + 1, F.elu(self.key(x)) + 1, self.value(x)
        return getattr(self, self.form)(q, k, v)

    def loop(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, total, outputs = q.new_zeros(B, D, D), q.new_zeros(B, D), []
        for t in range(T):
            state, total = state + k[:, t, :, None] * v[:, t, None], total + k[:, t]
            read = torch.einsum("bd,bde->be", q[:, t], state)
            outputs.append(self.divide(read, (q[:, t] * total).sum(-1, keepdim=True)))
        return torch.stack(outputs, 1)

    def after_loop(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, total, outputs, sums = q.new_zeros(B, D, D), q.new_zeros(B, D), [], []
        for t in range(T):
            state, total = state + k[:, t, :, None] * v[:, t, None], total + k[:, t]
            outputs.append(torch.einsum("bd,bde->be", q[:, t], state))
            sums.append((q[:, t] * total).sum(-1, keepdim=True))
        return self.divide(torch.stack(outputs, 1), torch.stack(sums, 1))

    def column_of_ones(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        state, outputs = q.new_zeros(B, D, D + 1), []
        for t in range(T):
            state = state + k[:, t, :, None] * v[:, t, None]
            read = torch.einsum("bd,bde->be", q[:, t], state)
            outputs.append(self.divide(read[..., :-1], read[..., -1:]))
        return torch.stack(outputs, 1)

    def chunks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state, total, outputs = q.new_zeros(B, D, D), q.new_zeros(B, 1, D), []
        for one, keys, values in zip(q.split(CHUNK, 1), k.split(CHUNK, 1), v.split(CHUNK, 1), strict=True):
            weights = (one @ keys.mT).tril()
            sums = (one * total).sum(-1, keepdim=True) + weights.sum(-1, keepdim=True)
            outputs.append(self.divide(one @ state + weights @ values, sums))
            state, total = state + keys.mT @ values, total + keys.sum(1, keepdim=True)
        return torch.cat(outputs, 1)


@pytest.mark.parametrize("form", ["loop", "after_loop", "column_of_ones", "chunks"])
@pytest.mark.parametrize("divides", ["sums", "norm", ""])
def test_a_note_says_that_a_map_leaves_out_the_divisor(form, divides):
    torch.manual_seed(0)
    model = NormalizedAttention(form, divides)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, D)))
    (call,) = recording.calls
    assert bool((call.map.dense().sum(-1) - 1).abs().amax() > 1)
    assert [one for one in recording.notes if LATER in one] == ([f"the model: {LATER}"] if divides == "sums" else [])
