"""Heads that code folds into the axis of the batch, before it or behind it, are those of the map."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL
from regard.observe import record
from regard.observe.attention_changes import KnockOut
from regard.observe.intervene import intervene

H, T, D = 3, 5, 4
LEADING = {
    "chunks that are joined": lambda x: torch.cat(x.chunk(H, -1), 0),
    "a permuted view": lambda x: x.view(*x.shape[:2], H, D).permute(2, 0, 1, 3).contiguous().view(-1, x.shape[1], D),
    "two transpositions": lambda x: x.unflatten(-1, (H, D)).transpose(1, 2).transpose(0, 1).reshape(-1, x.shape[1], D),
    "chunks that are stacked": lambda x: torch.stack(x.split(D, dim=-1)).flatten(0, 1),
    "a scaled view": lambda x: (x.reshape(*x.shape[:2], H, D) * 1.0).movedim(2, 0).reshape(-1, x.shape[1], D) / 1,
}
BEHIND = {
    "a transposed view": lambda x: x.view(*x.shape[:2], H, D).transpose(1, 2).reshape(-1, x.shape[1], D),
    "a permuted view": lambda x: x.view(*x.shape[:2], H, D).permute(0, 2, 1, 3).contiguous().view(-1, x.shape[1], D),
    "chunks that are stacked": lambda x: torch.stack(x.chunk(H, -1), 1).flatten(0, 1),
    "tokens first": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1, D).transpose(0, 1),
}


class Product(nn.Module):
    """The attention of folded heads, by hand or by a kernel."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, ~hidden)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
        return torch.bmm(scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Folded(nn.Module):
    def __init__(self, fold, by_hand: bool, *, leads: bool) -> None:
        super().__init__()
        self.fold, self.leads, self.attend = fold, leads, Product(by_hand)
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % T + 1
        hidden = (torch.arange(T) >= lengths[:, None])[:, None].expand(-1, T, -1)
        hidden = hidden.repeat(H, 1, 1) if self.leads else hidden.repeat_interleave(H, 0)
        y = self.attend(*(self.fold(project(x)) for project in (self.q, self.k, self.v)), hidden)
        y = y.unflatten(0, (H, -1)).transpose(0, 1) if self.leads else y.unflatten(0, (-1, H))
        return y.transpose(1, 2).flatten(2)


def compute_weights(model: nn.Module, x: Tensor) -> Tensor:
    q, k = (project(x).unflatten(-1, (H, D)).transpose(1, 2) for project in (model.q, model.k))
    lengths = torch.arange(len(x)) % T + 1
    hidden = (torch.arange(T) >= lengths[:, None]).view(-1, 1, 1, T)
    return (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf).softmax(-1)


def assert_heads_of_map(model: nn.Module, x: Tensor) -> None:
    """Fail unless the map has the weights (b, h, t, t) of the model, and a head that is knocked out leaves its channels 0."""
    with torch.no_grad(), record(model) as recording:
        output = model(x)
    assert not recording.missed
    torch.testing.assert_close(recording.map(0).dense(), compute_weights(model, x), rtol=0, atol=EQUAL)
    with torch.no_grad(), intervene(model, KnockOut(layer=0, head=1)):
        changed = model(x).unflatten(-1, (H, D))
    expected = output.unflatten(-1, (H, D)).clone()
    expected[:, :, 1] = 0
    torch.testing.assert_close(changed, expected, rtol=0, atol=EQUAL)


@pytest.mark.parametrize(
    ("fold", "leads", "by_hand", "b"),
    [
        (fold, leads, by_hand, (1, 2, H, T)[(n + by_hand) % 4])
        for leads, folds in ((True, LEADING), (False, BEHIND))
        for n, fold in enumerate(folds.values())
        for by_hand in (True, False)
    ],
)
def test_heads_that_are_folded_into_the_batch_are_those_of_the_map(fold, leads, by_hand, b, in_float64):
    torch.manual_seed(7)
    model, x = Folded(fold, by_hand, leads=leads), torch.randn(b, T, H * D)
    assert_heads_of_map(model, x)


class HeadsApart(nn.Module):
    """Attention with heads in an axis of their own, before the batch or behind it, as einops' example of the Transformer."""

    def __init__(self, form: str, *, are_stated: bool) -> None:
        super().__init__()
        self.form = form
        if are_stated:
            self.n_head = H
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        leads = self.form.startswith("heads first")
        order = (2, 0, 1, 3) if leads else (0, 2, 1, 3)
        q, k, v = (project(x).unflatten(-1, (H, D)).permute(order) for project in (self.q, self.k, self.v))
        lengths = torch.arange(len(x)) % T + 1
        hidden = (torch.arange(T) >= lengths[:, None])[(None, slice(None), None) if leads else (slice(None), None, None)]
        if self.form.endswith("a kernel"):
            y = F.scaled_dot_product_attention(q, k, v, ~hidden)
        elif self.form == "batch first, weights heads first":
            scores = torch.einsum("bhid,bhjd->hbij", q, k) / math.sqrt(D)
            weights = scores.masked_fill(hidden.transpose(0, 1), -torch.inf).softmax(-1)
            y = torch.einsum("hbij,bhjd->bhid", weights, v)
        else:
            scores = torch.einsum("xyid,xyjd->xyij", q, k) / math.sqrt(D)
            y = torch.einsum("xyij,xyjd->xyid", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return (y.permute(1, 2, 0, 3) if leads else y.transpose(1, 2)).flatten(2)


@pytest.mark.parametrize(("b", "are_stated"), [(1, False), (2, True), (H, False), (T, True)])
@pytest.mark.parametrize(
    "form", ["heads first", "heads first, a kernel", "batch first", "batch first, a kernel", "batch first, weights heads first"]
)
def test_heads_with_an_axis_before_the_batch_are_those_of_the_map(form, are_stated, b, in_float64):
    torch.manual_seed(7)
    model, x = HeadsApart(form, are_stated=are_stated), torch.randn(b, T, H * D)
    assert_heads_of_map(model, x)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_batch_of_heads_times_tokens_is_a_batch(by_hand, in_float64):
    class OneHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4  # of the model around it
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return (q @ k.mT).softmax(-1) @ v if by_hand else F.scaled_dot_product_attention(q, k, v, scale=1.0)

    model, x = OneHead(), torch.randn(32, 8, 8)
    with torch.no_grad(), record(model) as recording:
        model(x)
    expected = (model.q(x) @ model.k(x).mT).softmax(-1).unsqueeze(1)
    torch.testing.assert_close(recording.map(0).dense(), expected, rtol=0, atol=EQUAL)
