"""A sample with pads, whose vectors are zeros, shows what it shows without them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import Causal, Padding
from regard.examination.mask_requirements import infer_mask
from regard.mechanism import EVERYTHING

B, T, H, D, N = 3, 11, 2, 6, 17


class Model(nn.Module):
    """Attention on the vectors of tokens, of which that of token 0, a pad, is zeros; kinds are what may be about it."""

    def __init__(self, kind, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.factor, groups = kind, factor, 1 if kind == "grouped" else H
        self.tokens = nn.Embedding(N, H * D, padding_idx=0)
        self.q_proj, self.o_proj = (nn.Linear(H * D, H * D, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(H * D, groups * D, bias=False) for _ in range(2))

    def rotate(self, x):
        angles = torch.arange(x.shape[2]).unsqueeze(-1) * 100.0 ** (-torch.arange(D // 2) / (D // 2))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, input_ids, attention_mask):
        x = self.tokens(input_ids)
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.kind == "rotary":
            q, k = self.rotate(q), self.rotate(k)
        hidden = ~(torch.ones(T, T).tril().bool() & attention_mask.bool()[:, None, None])
        k, v = (part.repeat_interleave(H // part.shape[1], 1) for part in (k, v))
        if self.kind == "by hand":  # rows of pads are uniform, as in many models
            scores = (q @ k.mT * self.factor / math.sqrt(D)).masked_fill(hidden, torch.finfo(torch.float32).min)
            context = scores.softmax(-1) @ v
        else:
            context = F.scaled_dot_product_attention(q, k, v, ~hidden, scale=self.factor / math.sqrt(D))
        beside = F.pad(x, (0, 0, 1, -1)) if self.kind == "shifted" else 0
        return {"last": self.o_proj(context.transpose(1, 2).flatten(2)) + beside}


def make_sample(side, lengths):
    real = torch.arange(T) < torch.tensor(lengths).unsqueeze(1)
    real = real.flip(1) if side == "left" else real
    ids = torch.randint(1, N, (B, T), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids * real, "attention_mask": real.long()}


@pytest.mark.parametrize("kind", ["sdpa", "by hand", "rotary", "grouped"])
@pytest.mark.parametrize(("side", "lengths"), [("left", (7, 7, 6)), ("right", (9, T, 6))])
def test_pads_of_zeros_tell_nothing_of_the_scale(kind, side, lengths):
    sample = make_sample(side, lengths)
    real = sample["attention_mask"]
    report = regard.examine(Model(kind), sample=sample, expects=Causal() & Padding(real.sum(1), side=side))
    assert report.ok, report
    wrong = regard.examine(Model(kind, math.sqrt(D)), sample=sample, expects=Causal() & Padding(real.bool()))
    assert not wrong.ok
    assert "multiplied by 1," in str(wrong).replace("\n", " ")


def test_pads_on_the_other_side_are_another_rule():
    sample = make_sample("left", (9, T, 6))
    report = regard.examine(Model("sdpa"), sample=sample, expects=Causal() & Padding((9, T, 6)))
    assert report.findings[0].kind == "wrong mask"


def test_an_output_that_moves_with_a_pad_is_found_in_any_sequence():
    sample = make_sample("left", (T, T, 6))
    report = regard.examine(Model("shifted"), sample=sample, expects=Causal() & Padding((T, T, 6), side="left"))
    assert [one.kind for one in report.findings] == ["wrong mask"]
    assert f"token {T - 7} of sequence 2 moves output {T - 6}" in report.findings[0].evidence


def test_layers_that_ignore_padding_follow_the_rule_everything():
    seen, judged = torch.ones(B, T, T).bool(), make_sample("right", (9, T, 6))["attention_mask"].bool().unsqueeze(-1)
    assert infer_mask(seen, judged, Padding((9, T, 6))) == EVERYTHING
