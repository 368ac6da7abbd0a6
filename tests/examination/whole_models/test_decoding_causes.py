"""What differs first between the calls of a step with a cache and of the full forward is named."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import C, D, H, turn_halves
from regard import examine


class Cached(nn.Module):
    """Causal attention with rotary positions, whose cache has keys and values of earlier tokens."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))

    def turn(self, x, first):
        angles = torch.arange(first, first + x.shape[2])[:, None] * 100.0 ** (-torch.arange(0, D, 2) / D)
        return turn_halves(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))

    def place(self, q, k, count):
        return self.turn(q, count), self.turn(k, count)

    def join(self, past, k, v):
        return (k, v) if past is None else tuple(torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))

    def keep(self, k, v, t):
        return k, v

    def see(self, t, n):
        return torch.ones(t, n, dtype=torch.bool).tril(n - t)

    def forward(self, x, past=None, use_cache=False):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.place(q, k, 0 if past is None else past[0].shape[2])
        k, v = self.join(past, k, v)
        scores = (q @ k.mT / D**0.5).masked_fill(~self.see(x.shape[1], k.shape[2]), -torch.inf)
        y = self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (y, self.keep(k, v, x.shape[1])) if use_cache else y


class PositionsBehind(Cached):
    def place(self, q, k, count):
        return super().place(q, k, max(count - 1, 0))


class QueriesRestart(Cached):
    def place(self, q, k, count):
        return self.turn(q, 0), self.turn(k, count)


class Overwritten(Cached):
    def keep(self, k, v, t):
        return k[:, :, -t:], v[:, :, -t:]


class ValuesOverwritten(Cached):
    def keep(self, k, v, t):
        return k, torch.cat((v[:, :, -1:], v[:, :, 1:]), 2)


class MaskFromTheFirst(Cached):
    def see(self, t, n):
        return torch.ones(t, n, dtype=torch.bool).tril()


class RotatedTwice(Cached):
    def place(self, q, k, count):
        return self.turn(q, count), k

    def join(self, past, k, v):
        k, v = super().join(past, k, v)
        return self.turn(k, 0), v


CAUSES = {
    PositionsBehind: "has the position of token 0 for its query and its key",
    QueriesRestart: "has the position of token 0 for its query",
    Overwritten: "has 2 of 3 keys: earlier ones are overwritten or left out",
    ValuesOverwritten: "gets values that are not those of the full forward",
    MaskFromTheFirst: "does not see key 1, unlike in the full forward: the mask of a step counts from another token",
    RotatedTwice: "gets cached keys that are not those of the full forward, but have their norms",
}


@pytest.mark.slow
@pytest.mark.parametrize("make", CAUSES)
def test_the_cause_of_another_output_is_named(make):
    torch.manual_seed(0)
    (finding, *_) = examine(make()).findings
    assert finding.kind == "wrong cache"
    assert CAUSES[make] in finding.evidence
