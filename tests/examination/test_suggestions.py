"""A part of a module is suggested only if examining it alone was tried and shows its scale."""

import torch
from torch import nn

from examination.test_conclusive import C, Heads
from regard import Causal
from regard.examination import examine
from regard.examination.probe_runner import suggest_part


class NeedsMore(Heads):
    """Attention that takes an argument which only its block knows."""

    def forward(self, x, shift):
        return super().forward(x) + shift


def test_a_part_that_shows_its_scale_is_suggested_by_its_path():
    blocks = nn.Sequential(nn.Sequential(Heads()))
    assert suggest_part(blocks, ["0.0"], Causal(), 0, "model") == "examine(model[0][0])"


def test_no_report_suggests_what_fails():
    class Block(nn.Module):
        """A residual around attention that needs more than x, whose weights are no softmax that is known."""

        def __init__(self):
            super().__init__()
            self.attn = NeedsMore()

        def forward(self, x):
            return x + self.attn(x.tanh(), torch.ones(C)).sin()

    assert "examine(layer.attn)" not in str(examine(Block()))
