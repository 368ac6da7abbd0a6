"""Where a layer does more than attention, the attention in it is examined as the layer calls it, under its own name."""

import pytest
import torch
from torch import nn

import regard
from examination.subjects import Layer, hiding, later
from regard import Everything

C, HEADS = 12, 3


class Attention(Layer):
    """Attention with a scale of its own."""

    def __init__(self, times=1.0):
        super().__init__(lambda scores: hiding(later)(scores * times), C, C)


class Block(nn.Module):
    """Norms, residuals and a feed-forward part around an attention that it calls with `named`."""

    def __init__(self, attention, **named):
        super().__init__()
        torch.manual_seed(1)
        self.parts = nn.ModuleList([attention])
        self.first, self.second = nn.LayerNorm(C), nn.LayerNorm(C)
        self.feed = nn.Sequential(nn.Linear(C, 17), nn.GELU(), nn.Linear(17, C))
        self.named = named

    def forward(self, x):
        h = self.first(x)
        returned = self.parts[0](h, **self.named)
        x = x + (returned[0] if isinstance(returned, tuple) else returned)
        return x + self.feed(self.second(x))


class Torchs(Block):
    """The same with nn.MultiheadAttention, which takes the mask, and query, key and value."""

    def __init__(self, **named):
        super().__init__(nn.MultiheadAttention(C, HEADS, batch_first=True), **named)

    def forward(self, x):
        h, hidden = self.first(x), torch.zeros(x.shape[1], x.shape[1])
        hidden = hidden.masked_fill(torch.ones_like(hidden).triu(1).bool(), -torch.inf).to(x.dtype)
        x = x + self.parts[0](h, h, h, attn_mask=hidden, **self.named)[0]
        return x + self.feed(self.second(x))


@pytest.mark.parametrize("make", [lambda: Block(Attention()), Torchs, lambda: Torchs(need_weights=False)])
def test_what_cannot_be_determined_of_a_block_is_reported_of_the_attention_in_it(make):
    report = regard.examine(make())
    assert report, str(report)
    assert {"in parts.0 the scale of the scores", "in parts.0 query, key and value are used in their roles"} <= {
        one.what for one in report.checked
    }
    assert not report.unknown
    assert "checked in parts.0" in report.notes[-1]


def test_the_attention_in_a_block_that_runs_in_one_dtype_alone_is_read_in_float64():
    class Narrow(Block):
        def forward(self, x):
            return super().forward(x.float())

    class Masked(Attention):
        def forward(self, x, hidden):
            q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
            return torch.baddbmm(hidden, q, k.mT, alpha=C**-0.5).softmax(-1) @ v

    report = regard.examine(Narrow(Masked(), hidden=torch.full((6, 6), -torch.inf).triu(1).expand(2, 6, 6)))
    assert report, str(report)
    assert any("in parts.0 the scale" in one.what and "e-16" in one.sensitivity for one in report.checked)
    assert any("in float64 it" in one.what for one in report.unknown)


@pytest.mark.slow
def test_a_mistake_of_the_attention_in_a_block_is_named_with_its_place():
    (finding,) = regard.examine(Block(Attention(5**0.5))).findings
    assert finding.kind == "wrong scale"
    assert finding.evidence.startswith("parts.0: ")


@pytest.mark.slow
def test_a_part_that_cannot_be_read_is_named_as_what_to_ask():
    class Turned(Attention):
        def forward(self, x):
            return super().forward(x) * torch.sigmoid(x)  # a gate: no formula of the family

    report = regard.examine(Block(Turned()))
    assert report
    (needs,) = {one.needs for one in report.unknown}
    assert needs.startswith("examine(layer.parts[0]); or the attention alone")


@pytest.mark.slow
def test_parts_that_see_one_token_at_a_time_are_no_attention():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(C, 17), nn.Linear(17, C)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x))).mean(1, keepdim=True)

    report = regard.examine(Mean(), expects=Everything())
    assert not any("examine(layer." in one.needs for one in report.unknown)
    assert len(report.notes) == 2
