"""A mask that is right at one length and wrong at another is found."""

import pytest
import torch

from examination import wrong_kernels as wrong
from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later
from regard import Causal, CausalAttention, Everything, Window
from regard.examination.probes.lengths import check_case

DRAW = torch.Generator().manual_seed(0)  # of a layer's own


def switch_mask_beyond(length, beyond):
    """Weights of a mask made for a length, and others beyond it."""
    return lambda scores: hiding(later if scores.shape[-1] <= length else beyond)(scores)


class Made(Layer):
    def __init__(self, length, beyond):
        super().__init__(switch_mask_beyond(length, beyond))
        self.context_length = length


def nothing(q, k):
    return torch.zeros(q, k, dtype=torch.bool)


def make_mask_of_length(length):
    """The mask of the first tokens, and nothing hidden from those after them."""

    def make_table(q, k):
        table = torch.zeros(q, k, dtype=torch.bool)
        table[:length, :length] = later(length, length)
        return table

    return make_table


@pytest.mark.parametrize("length", [7, 12, 31, 129])
@pytest.mark.parametrize("beyond", [lambda length: nothing, make_mask_of_length])
def test_a_leak_beyond_the_length_that_a_mask_is_made_for_is_found(length, beyond):
    (finding,) = check_case(case_of(Made(length, beyond(length))))
    assert finding.kind == "future leak"
    assert f"with {min(13, length + 1) if length < 12 else length + 1}" in finding.evidence


def test_a_leak_of_short_inputs_is_found():
    layer = Layer(lambda scores: hiding(later if scores.shape[-1] > 2 else nothing)(scores))
    (finding,) = check_case(case_of(layer))
    assert "with 2 tokens" in finding.evidence


@pytest.mark.parametrize("length", [4, 6, 13, 200])
def test_refusing_more_tokens_is_no_fault(length):
    (checked,) = check_case(case_of(CausalAttention(D_IN, 5, length, 0.0).eval()))
    assert f"rejects {length + 1}" in checked.sensitivity or str(length + 1) in checked.sensitivity.split("rejects")[1]


@pytest.mark.parametrize("expects", [Everything(), Window(2, 2), Causal() & Window(left=3)])
def test_a_mask_that_holds_at_every_length_has_no_finding(expects):
    assert kinds(check_case(case_of(Layer(hiding(lambda q, k: ~expects.table(q, k))), expects))) == []


@pytest.mark.parametrize("draw", [torch.randn, lambda *shape: torch.randn(*shape, generator=DRAW)], ids=["torch's", "its own"])
def test_random_numbers_of_longer_inputs_are_no_leak(draw):
    class Noisy(Layer):
        def forward(self, x):
            y = super().forward(x)
            return y + draw(*y.shape) if x.shape[1] > 64 else y

    (finding,) = check_case(case_of(Noisy(hiding(later))))
    assert finding.kind == "dropout in evaluation", finding


@pytest.mark.parametrize("beyond", [7, 40, 100, 200])
def test_positions_that_stretch_with_the_length_are_no_finding(beyond):
    """As rotary positions do that are made for longer inputs than a layer was trained on."""

    class Stretched(wrong.Fused):
        def attend(self, q, k, v):
            times = max(1.0, q.shape[-2] / beyond)
            return wrong.online(wrong.rotate_halves(q, times), wrong.rotate_halves(k, times), v, 16)

    *unknown, checked = check_case(case_of(Stretched()))
    assert kinds([*unknown, checked]) == []
    assert "more tokens" in unknown[0].what
    assert "consistent" not in checked.what  # outputs differ
