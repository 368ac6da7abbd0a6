"""The slice of a projection that each head comes from is found by norms, and said to be unknown where all norms are equal."""

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import Rotary, turn_halves
from regard.examination import examine
from regard.examination.projection_source import ModuleOutput, find_source


def test_the_slices_of_heads_are_found_in_their_order_through_a_factor():
    y = torch.randn(2, 7, 4, 5, generator=torch.Generator().manual_seed(3))
    source = find_source(3 * y.flip(2).transpose(1, 2), [ModuleOutput("k_proj", y.flatten(2))])
    assert source.slices == (3, 2, 1, 0)
    assert source.slice_count == 4
    assert abs(source.factor - 3) < 7 * 5 * torch.finfo(torch.float32).eps * 3


def test_slices_of_one_norm_are_not_told_apart():
    y = F.normalize(torch.randn(2, 7, 4, 5, generator=torch.Generator().manual_seed(3)), dim=-1)
    source = find_source(y.transpose(1, 2), [ModuleOutput("k_norm", y.flatten(2))])
    assert source.name == "k_norm"
    assert source.slice_count == 0


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
