"""Whatever is done to scores, weights and values on their way, attention written out by hand is recorded or missed."""

import warnings
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from observe.interception.handwritten.handwritten_attention import mask_in_script
from regard.observe import record

T, D = 5, 7
ROUNDED = 2e-6  # one of the steps and "of the values" round to float32
ORDER = torch.tensor([3, 0, 4, 1, 2])
HALF = torch.tensor([[True, False, False, True, True]])

# of a matrix (..., t, t), whose result is again one
STEPS = {
    "scaled": lambda x: x * 0.7,
    "divided": lambda x: x / 1.3,
    "negated": lambda x: -x,
    "shifted": lambda x: x + torch.arange(5.0),
    "taken from": lambda x: 2 - x,
    "added to in place": lambda x: x.add(0).add_(0.5),
    "transposed twice": lambda x: x.mT.contiguous().mT,
    "permuted": lambda x: torch.einsum("...ij->...ji", x),
    "rolled": lambda x: torch.roll(x, 1, -1),
    "flipped": lambda x: x.flip(-2),
    "selected": lambda x: x.index_select(-1, ORDER),
    "gathered": lambda x: x.gather(-1, ORDER.expand(x.shape)),
    "indexed": lambda x: x[..., ORDER],
    "taken along": lambda x: torch.take_along_dim(x, ORDER.expand(x.shape), -1),
    "halved and joined": lambda x: torch.cat(x.split(2, -1), -1),
    "taken apart and stacked": lambda x: torch.stack(x.unbind(-1), -1),
    "iterated": lambda x: torch.stack([*x]),
    "padded and cut": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "repeated and cut": lambda x: x.repeat(*[1] * (x.dim() - 1), 2)[..., :T],
    "interleaved and cut": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "flattened and back": lambda x: x.flatten(-2).unflatten(-1, (T, T)),
    "viewed": lambda x: x.reshape(-1, T * T).view(x.shape),
    "expanded and averaged": lambda x: x.unsqueeze(0).expand(3, *x.shape).mean(0),
    "cloned": lambda x: x.clone(),
    "rounded": lambda x: x.to(torch.float32).double(),
    "written elsewhere": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    "written by parts": lambda x: write(x),
    "scattered": lambda x: torch.zeros(x.shape, dtype=x.dtype).scatter(-1, ORDER.expand(x.shape), x),
    "hidden": lambda x: x.masked_fill(torch.ones(T, T).triu(1).bool(), 0.1),
    "chosen": lambda x: torch.where(HALF, x, x * 0.5),
    "without nan": lambda x: x.nan_to_num(),
    "dropped": lambda x: F.dropout(x, 0.3),
    "scripted": lambda x: mask_in_script(x),
    "tiled": lambda x: torch.tile(x, (2, 1))[..., :T, :],
    "of its diagonal": lambda x: x + torch.diag_embed(x.diagonal(dim1=-2, dim2=-1)),
    "movedim": lambda x: x.movedim(-1, 0).movedim(0, -1),
}
BENT = {  # of scores alone
    "capped": lambda x: 5 * torch.tanh(x / 5),
    "to a power": lambda x: x**2,
    "relu": lambda x: x.relu(),
    "clamped": lambda x: x.clamp(-3, 3),
    "absolute": lambda x: x.abs(),
    "sharpened": lambda x: F.softplus(x),
}
SOFTMAXES = {
    "method": lambda x: x.softmax(-1),
    "function": lambda x: torch.softmax(x, -1),
    "exponentials": lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    "logarithms": lambda x: x.log_softmax(-1).exp(),
    "over the rows": lambda x: F.softmax(x, dim=-2),
}
SCORES = {
    "@": lambda q, k: q @ k.mT,
    "einsum": lambda q, k: torch.einsum("...qd,...kd->...qk", q, k),
    "sums": lambda q, k: (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1),
    "distances": lambda q, k: -torch.cdist(q, k),
    "squares": lambda q, k: -((q.unsqueeze(-2) - k.unsqueeze(-3)) ** 2).sum(-1),
    "loop": lambda q, k: torch.stack([(q * k[..., j, None, :]).sum(-1) for j in range(T)], -1),
    "cosines": lambda q, k: F.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1),
}
PRODUCTS = {
    "@": lambda w, v: w @ v,
    "einsum": lambda w, v: torch.einsum("...qk,...kd->...qd", w, v),
    "on the left": lambda w, v: (v.mT @ w.mT).mT,
    "sums": lambda w, v: (w.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2),
    "repeated sums": lambda w, v: (w.unsqueeze(-1).repeat(*[1] * w.dim(), D) * v.unsqueeze(-3)).sum(-2),
    "loop": lambda w, v: sum(w[..., j, None] * v[..., j, None, :] for j in range(T)),
    "rows": lambda w, v: torch.stack([(w[..., i, :, None] * v).sum(-2) for i in range(T)], -2),
}
OF_VALUES = {
    "scaled": lambda v: v * 3,
    "negated": lambda v: -v,
    "rolled back": lambda v: v.roll(-1, -2),
    "cloned": lambda v: v.clone(),
    "rounded": lambda v: v.float().double(),
    "taken apart": lambda v: torch.stack(v.unbind(-2), -2),
    "joined": lambda v: torch.cat([v[..., :2, :], v[..., 2:, :]], -2),
    "dropped": lambda v: F.dropout(v, 0.3),
    "picked": lambda v: v[..., ORDER, :],
}


def write(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    for j in range(T):
        out[..., j] = x[..., j]
    return out


class Chain(nn.Module):
    """Scores, steps, a softmax, steps, a product with values that took steps."""

    def __init__(self, scores, before, softmax, after, of_values, product) -> None:
        super().__init__()
        self.project = nn.Linear(D, 3 * D, dtype=torch.float64)
        self.scores, self.product = SCORES[scores], PRODUCTS[product]
        self.steps = [*((STEPS | BENT)[name] for name in before), SOFTMAXES[softmax], *(STEPS[name] for name in after)]
        self.of_values = [OF_VALUES[name] for name in of_values]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        weights = reduce(lambda y, step: step(y), self.steps, self.scores(q, k))
        return self.product(weights, reduce(lambda y, step: step(y), self.of_values, v))


def some(steps: dict[str, object], most: int = 4) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(steps)), max_size=most)


@pytest.mark.slow
@settings(max_examples=250)
@given(
    scores=st.sampled_from(sorted(SCORES)),
    before=some(STEPS | BENT),
    softmax=st.sampled_from(sorted(SOFTMAXES)),
    after=some(STEPS),
    of_values=some(OF_VALUES, 2),
    product=st.sampled_from(sorted(PRODUCTS)),
    batch=st.sampled_from([(), (2,), (2, 3)]),
)
@example(scores="@", before=[], softmax="logarithms", after=["divided"], of_values=[], product="@", batch=())
def test_what_is_done_to_attention_on_its_way_is_recorded_as_it_acts_or_missed(
    scores, before, softmax, after, of_values, product, batch
):
    chain = Chain(scores, before, softmax, after, of_values, product)
    model, x = nn.Sequential(chain), torch.randn(*batch, T, D, dtype=torch.float64)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with warnings.catch_warnings(action="ignore"), record(model, keep="values") as recording:
        recorded = model(x)
    assert torch.equal(plain.nan_to_num(), recorded.nan_to_num())
    assert {one.module for one in recording.missed} | set(recording.names) == {"0"}
    is_whole = len(recording.calls) == 1 and not recording.missed and "dropped" not in after  # maps are before dropout
    is_scaled = softmax == "exponentials" or any(
        "gate" in note or "their sums" in note for note in recording.notes
    )  # maps leave out a row's factor
    if is_whole and not is_scaled and plain.isfinite().all():
        found = recording.calls[0].map @ recording.values("0", kind=recording.calls[0].kind)
        torch.testing.assert_close(found.reshape(plain.shape), plain, rtol=ROUNDED, atol=ROUNDED)
