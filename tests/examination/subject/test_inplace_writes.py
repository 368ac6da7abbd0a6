"""What a subject writes to of its caller's tensors is a finding, and is put back."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.subjects import Layer, hiding, later
from examination.whole_models import Still, causal
from regard import Everything
from regard.examination.examine import examine

SEEN = torch.ones(600, 600).tril().bool()


def attend_and_wipe_mask(q, k, v, mask):
    """Attention under a mask that is wiped out afterwards."""
    t = q.shape[-2]
    y = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask[:t, :t], -torch.inf).softmax(-1) @ v
    mask.fill_(True)
    return y


MASK = SEEN.clone()


def attend_with_global_mask(q, k, v):
    return attend_and_wipe_mask(q, k, v, MASK)


def attend_with_default_mask(q, k, v, mask=SEEN.clone()):  # noqa: B008
    return attend_and_wipe_mask(q, k, v, mask)


def attend_with_keyword_mask(q, k, v, *, mask=SEEN.clone()):  # noqa: B008
    return attend_and_wipe_mask(q, k, v, mask)


def make_closure_over_mask(mask):
    return lambda q, k, v: attend_and_wipe_mask(q, k, v, mask)


class Owner:
    def attend(self, q, k, v, mask=SEEN.clone()):  # noqa: B008
        return attend_and_wipe_mask(q, k, v, mask)


@pytest.mark.parametrize(
    ("subject", "mask", "name"),
    [
        (attend_with_global_mask, MASK, "MASK"),
        (attend_with_default_mask, attend_with_default_mask.__defaults__[0], "mask"),
        (attend_with_keyword_mask, attend_with_keyword_mask.__kwdefaults__["mask"], "mask"),
        (Owner().attend, Owner.attend.__defaults__[0], "mask"),
        (closure := make_closure_over_mask(SEEN.clone()), closure.__closure__[0].cell_contents, "mask"),
        (partial := functools.partial(attend_and_wipe_mask, mask=SEEN.clone()), partial.keywords["mask"], "mask"),
    ],
)
def test_a_mask_that_a_function_holds_and_changes_is_named_and_put_back(subject, mask, name):
    report = examine(subject)
    assert [one.kind for one in report.findings] == ["changed input"], str(report)
    assert report.findings[0].evidence.endswith(f": {name}")
    assert torch.equal(mask, SEEN)


def make_inplace_writer(name):
    """A function that changes one of q, k and v after its attention."""

    def function(q, k, v):
        y = F.scaled_dot_product_attention(q, k, v)
        {"q": q, "k": k, "v": v}[name][:, :, :1] += 1  # of a view, too
        return y

    return function


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_function_that_changes_an_argument_gets_its_name(name):
    sample = torch.randn(3, 2, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    before = sample.clone()
    report = examine(make_inplace_writer(name), expects=Everything(), sample=tuple(sample))
    assert [one.kind for one in report.findings] == ["changed input"], str(report)
    assert report.findings[0].evidence.endswith(f": {name}")
    assert torch.equal(sample, before)


class Sometimes(Layer):
    """A right layer that wipes its input out in training, or where it is long."""

    def __init__(self, when):
        super().__init__(hiding(later))
        self.when = when

    def forward(self, x):
        y = super().forward(x)
        if self.when(self, x):
            x.zero_()
        return y


@pytest.mark.parametrize("when", [lambda layer, x: x.shape[1] > 6, lambda layer, x: x.dtype == torch.float64])
def test_an_input_that_is_changed_in_some_calls_alone_is_found(when):
    assert "changed input" in [one.kind for one in examine(Sometimes(when)).findings]


class Wiping(Still):
    """A right model that wipes its ids out."""

    def forward(self, ids):
        y = super().forward(ids)
        ids.zero_()
        return y


@pytest.mark.parametrize("sample", [None, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])])
def test_a_model_that_changes_its_ids_is_reported(sample):
    torch.manual_seed(0)
    report = examine(Wiping(causal), sample=sample)
    assert [one.kind for one in report.findings] == ["changed input"], str(report)
    assert report.findings[0].evidence.endswith(": ids")
    assert sample is None or sample.min() > 0


@pytest.mark.slow
def test_a_tensor_that_is_held_and_only_read_is_no_finding():
    def reading(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=SEEN[: q.shape[-2], : k.shape[-2]])

    assert examine(reading), str(examine(reading))
    held = nn.Parameter(torch.ones(()))
    assert regard.examine(lambda q, k, v: F.scaled_dot_product_attention(q, k, v * held, is_causal=True))
