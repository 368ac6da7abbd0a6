"""The slice of a projection that each head comes from is found by norms, and said to be unknown where all norms are equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination import wrong_calls
from examination.right_variants import NormedGroups
from examination.wrong_calls import Rotary, turn_halves, turn_neighbors
from regard.examination import examine
from regard.examination.call_reading.inner_calls import record_inner_calls
from regard.examination.call_reading.projection_source import ModuleOutput, find_source


def test_the_slices_of_heads_are_found_in_their_order_through_a_factor():
    y = torch.randn(2, 7, 4, 5, generator=torch.Generator().manual_seed(3))
    source = find_source(3 * y.flip(2).transpose(1, 2), [ModuleOutput("k_proj", y.flatten(2))])
    assert source.slices == (3, 2, 1, 0)
    assert source.slice_count == 4
    assert abs(source.factor - 3) < 7 * 5 * torch.finfo(torch.float32).eps * 3


def make_normed_heads(seed, heads=3, width=10):
    """Heads (b, t, h, d) of norm 1, and the angles of their tokens (t, d / 2)."""
    x = torch.randn(2, 7, heads, width, generator=torch.Generator().manual_seed(seed))
    return F.normalize(x, dim=-1), torch.arange(7)[:, None] * 0.3 ** torch.arange(width // 2)


def test_equal_slices_are_not_told_apart():
    y = make_normed_heads(3)[0][:, :, :1].expand(-1, -1, 3, -1)
    source = find_source(y.transpose(1, 2), [ModuleOutput("k_norm", y.flatten(2))])
    assert source.name == "k_norm"
    assert source.slice_count == 0
    assert source.is_ambiguous


@pytest.mark.parametrize("turn", [lambda x, *_: x, turn_halves, turn_neighbors])
@pytest.mark.parametrize("count", [10, 6])  # columns that are rotated
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 2, 0], [1]])
def test_heads_of_one_norm_are_told_by_what_a_rotation_keeps(turn, count, order):
    (y, angles), (other, _) = make_normed_heads(3), make_normed_heads(4)
    x = y[:, :, order].transpose(1, 2)
    angles = angles[:, : count // 2]
    x = torch.cat((turn(x[..., :count], angles.cos(), angles.sin()), x[..., count:]), -1)
    for outputs in ([("q_norm", other), ("k_norm", y)], [("k_norm", y), ("q_norm", other)]):
        for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):  # tokens before heads, or heads before tokens
            source = find_source(x, [ModuleOutput(name, heads.permute(axes)) for name, heads in outputs])
            assert (source.name, source.slices, source.slice_count) == ("k_norm", tuple(order), 3)


class Normed:
    """A norm of each head of queries and of keys, before they are rotated."""

    def __init__(self, norm):
        super().__init__()
        self.q_norm, self.k_norm = norm(6), norm(6)

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))


class FirstGroupOnly(NormedGroups):
    """All queries meet the first head of keys and of values."""

    def attend(self, q, k, v):
        return super().attend(q, *(x[:, :1].expand_as(x) for x in (k, v)))


MISTAKES = ["StylesMixed", "CosAndSinExchanged", "Opposite", "OfQueriesInKernel", "WithOtherBase", "KeysLater"]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("mistake", [*MISTAKES, "Tiled"])
def test_mistakes_beside_norms_of_heads_are_found(mistake, norm):
    torch.manual_seed(0)
    layer = type(mistake, (Normed, getattr(wrong_calls, f"Rotary{mistake}")), {})(norm)
    kinds = [finding.kind for finding in examine(layer).findings]
    assert kinds == ["mixed heads" if mistake == "Tiled" else "wrong positions"]


def test_positions_and_heads_are_checked_beside_norms_of_heads():
    torch.manual_seed(0)
    what = [one.what for one in examine(NormedGroups()).checked]
    assert "heads are independent: 4 of width 6" in what
    assert any(one.startswith("rotary positions: 6 columns in pairs of columns i and i + d / 2") for one in what)


def test_key_heads_that_no_query_meets_are_found():
    torch.manual_seed(0)
    (finding,) = examine(FirstGroupOnly()).findings
    assert finding.kind == "mixed heads"
    assert "only 1 of the 2 heads that k_norm makes is used" in finding.evidence


class Turn(nn.Module):
    """Rotary positions of heads (b, t, h, d), in a module of their own."""

    def forward(self, x, angles):
        return turn_halves(x, angles.cos(), angles.sin())


class RotaryByModule(Rotary):
    """Queries and keys rotated by a module, whose outputs have the norms of the projections."""

    def __init__(self):
        super().__init__()
        self.turn = Turn()

    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)[:, None]
        return tuple(self.turn(x.transpose(1, 2), angles).transpose(1, 2) for x in (q, k))


def test_a_module_that_rotates_is_not_the_source_of_what_it_rotates():
    torch.manual_seed(0)
    what = [one.what for one in examine(RotaryByModule()).checked]
    assert "queries and keys come from their own projections" in what
    assert any(one.startswith("rotary positions: 6 columns in pairs of columns i and i + d / 2") for one in what)


class NormedQueriesAndKeys(nn.Module):
    """Norms of queries and keys of each head, and a module after the softmax, whose output is (b, h, t, t)."""

    def __init__(self, after, softmax, h=4, d=6):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(h * d, h * d) for _ in range(4))
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])
        self.after, self.softmax, self.h = after, softmax, h

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.norms[0](q) @ self.norms[1](k).mT * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = self.after(self.softmax(scores.masked_fill(hidden, -torch.inf)))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def divide_exponentials(scores):
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [nn.Softmax(-1), divide_exponentials])
@pytest.mark.parametrize("after", [nn.Identity(), nn.Dropout(0.0)])
@pytest.mark.parametrize("tokens", [6, 7])  # heads are 6 wide
def test_weights_are_no_source_of_keys_if_heads_are_as_wide_as_there_are_tokens(after, softmax, tokens):
    torch.manual_seed(0)
    layer = NormedQueriesAndKeys(after, softmax).eval()
    x = torch.randn(2, tokens, 24)
    (call,) = record_inner_calls(layer, lambda: layer(x)).calls
    assert {call.q_source.name, call.k_source.name} <= {"norms.0", "norms.1"}
    assert abs(call.scale - 6**-0.5) < 1e-5
    assert examine(layer, sample=x)
