"""Heads whose columns are not neighbors, (b, t, d, h): right if queries, keys and values are split alike."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import turn_halves
from regard import Causal, Everything, examine

C, H = 24, 4
D = C // H


class Layer(nn.Module):
    """Attention of H heads, or of keys in groups, whose `orders` of q, k, v and the context are "hd" or "dh"."""

    orders, groups, is_causal, has_kernel, is_rotated, is_fused = ("dh", "dh", "dh", "hd"), H, True, False, False, False

    def __init__(self):
        super().__init__()
        self.n_heads, self.head_dim = H, D
        widths = [C, self.groups * D, self.groups * D]
        if self.is_fused:
            self.qkv = nn.Linear(C, sum(widths), bias=False)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, width, bias=False) for width in widths)
        self.o_proj = nn.Linear(C, C)

    def project(self, x):
        return self.qkv(x).split(C, -1) if self.is_fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def split(self, x, order):
        b, t, c = x.shape
        return x.view(b, t, -1, D).transpose(1, 2) if order == "hd" else x.view(b, t, D, c // D).permute(0, 3, 1, 2)

    def forward(self, x):
        t = x.shape[1]
        q, k, v = (self.split(one, order) for one, order in zip(self.project(x), self.orders, strict=False))
        if self.is_rotated:  # the width of heads that are exchanged is H
            angles = (torch.arange(t)[:, None] * 100.0 ** (-torch.arange(0, q.shape[-1], 2) / D)).to(x.dtype)
            q, k = (turn_halves(one, angles.cos(), angles.sin()) for one in (q, k))
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        context = self.attend(q, k, v)
        last = context.transpose(1, 2) if self.orders[3] == "hd" else context.permute(0, 2, 3, 1)
        return self.o_proj(last.flatten(2))

    def attend(self, q, k, v):
        if self.has_kernel:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        scores = q @ k.mT / math.sqrt(D)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf) if self.is_causal else scores).softmax(-1) @ v


class Exchanged(Layer):
    """(b, t, d, h) and then transpose(1, 2), so that there are D heads of width H."""

    def split(self, x, order):
        return x.view(*x.shape[:2], self.head_dim, self.n_heads).transpose(1, 2)


def examine_layer(base=Layer, **choices):
    torch.manual_seed(0)
    made = type(base.__name__, (base,), choices)
    return examine(made(), expects=Causal() if made.is_causal else Everything())


FORMS = [{}, {"is_fused": True}, {"groups": 2}, {"has_kernel": True, "is_causal": False}, {"is_rotated": True}]
FORMS += [{"is_rotated": True, "is_fused": True}, {"groups": 2, "is_rotated": True, "has_kernel": True}]


@pytest.mark.slow
@pytest.mark.parametrize("joined", ["hd", "dh"])
@pytest.mark.parametrize("form", FORMS)
def test_heads_that_are_all_split_as_width_and_heads_are_right(form, joined):
    report = examine_layer(orders=("dh", "dh", "dh", joined), **form)
    assert report, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"is_rotated": True, "has_kernel": True}, {"groups": 2, "is_rotated": True}])
def test_columns_that_are_not_neighbors_are_stated(form):
    said = [one.what for one in examine_layer(**form).checked]
    assert f"heads are independent: {H} of width {D}, whose columns are not neighbors" in said


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"is_fused": True}, {"groups": 2, "has_kernel": True}, {"is_rotated": True}])
@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (("hd", "dh", "hd", "hd"), "queries are split into heads as (heads, width), but keys as (width, heads)"),
        (("dh", "hd", "hd", "hd"), "queries are split into heads as (width, heads), but keys as (heads, width)"),
        (("hd", "hd", "dh", "hd"), "keys are split into heads as (heads, width), but values as (width, heads)"),
    ],
)
def test_heads_that_are_not_split_alike_are_found(orders, said, form):
    finding = examine_layer(orders=orders, **form).findings[0]
    assert finding.kind == "mixed heads"
    assert said in finding.evidence


@pytest.mark.parametrize("form", [{}, {"is_fused": True}, {"has_kernel": True, "is_causal": False}, {"is_rotated": True}])
def test_heads_and_width_exchanged_are_found(form):
    finding = examine_layer(Exchanged, orders=("hd",) * 4, **form).findings[0]
    assert finding.kind == "mixed heads"
    assert f"there are {D} heads of width {H}, though n_heads is {H} and head_dim is {D}" in finding.evidence


class HalvesLast(Layer):
    """The same of keys and values, (b, t, g, d, 2)."""

    def __init__(self):
        super().__init__()
        self.to_kv = nn.Linear(C, 2 * self.groups * D, bias=False)
        del self.k_proj, self.v_proj

    def project(self, x):
        return self.q_proj(x), *(one.flatten(2) for one in self.to_kv(x).view(*x.shape[:2], -1, D, 2).unbind(-1))


@pytest.mark.parametrize("form", [{}, {"has_kernel": True}])
def test_keys_whose_heads_are_tiled_are_found_of_halves_on_the_last_axis(form):
    class Tiled(HalvesLast):
        def project(self, x):
            q, k, v = super().project(x)
            return q, *(one.unflatten(-1, (2, D)).repeat(1, 1, 2, 1).flatten(2) for one in (k, v))

    finding = examine_layer(Tiled, orders=("hd",) * 4, groups=2, is_rotated=True, **form).findings[0]
    assert finding.kind == "mixed heads"
    assert "in the wrong order" in finding.evidence
