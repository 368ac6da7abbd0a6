"""The slopes of a bias by distance are read, and those that grow in some heads alone are named."""

import math

import pytest
import torch
import torch.nn.functional as F

from examination.subjects import case_of
from examination.wrong_calls import H, Rotary
from regard import Causal, Everything, examine
from regard.examination.call_reading import bias_reading
from regard.examination.probes.order import check_case

SLOPES = 2.0 ** -torch.arange(1, H + 1)


class Alibi(Rotary):
    """Causal attention of a kernel with a bias of -slope * distance in each head."""

    def __init__(self, slopes):
        super().__init__()
        self.register_buffer("slopes", slopes)

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        bias = (-self.slopes[:, None, None] * back).masked_fill(back < 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))


class BothWays(Alibi):
    """The same of an encoder, with the distance to keys on both sides."""

    def attend(self, q, k, v):
        t = q.shape[2]
        distance = (torch.arange(t)[:, None] - torch.arange(t)).abs()
        return F.scaled_dot_product_attention(q, k, v, (-self.slopes[:, None, None] * distance).to(q.dtype))


def check_slopes(slopes, layer=Alibi, expects=None):
    torch.manual_seed(0)
    results = check_case(case_of(layer(slopes), expects=Causal() if expects is None else expects))
    return [getattr(one, "what", "") for one in results]


def test_slopes_are_read():
    assert f"a bias falls with the distance of a key, slopes from {SLOPES[-1]:.3g} to 0.5" in check_slopes(SLOPES)
    assert "a bias falls with the distance of a key, slope 0.25" in check_slopes(torch.full((H,), 0.25))


def test_slopes_on_both_sides_of_a_query_are_read():
    what = f"a bias falls with the distance of a key, slopes from {SLOPES[-1]:.3g} to 0.5"
    assert what in check_slopes(SLOPES, BothWays, Everything())
    torch.manual_seed(0)
    (finding,) = examine(BothWays(-SLOPES), expects=Everything()).findings
    assert finding.kind == "wrong positions"
    assert finding.evidence == "in the layer the bias of every head grows with the distance of a key"


def publish_slopes(heads):
    """The slopes of Press et al. 2022, as their code computes them."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    near = 2 ** math.floor(math.log2(heads))
    return publish_slopes(near) + publish_slopes(2 * near)[0::2][: heads - near]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 40])
def test_slopes_of_alibi_are_those_of_its_code(heads):
    torch.testing.assert_close(bias_reading.list_alibi_slopes(heads), torch.tensor(publish_slopes(heads)).double())


RIGHT = torch.tensor(publish_slopes(H))


def list_results(layer, expects=None):
    torch.manual_seed(0)
    results = check_case(case_of(layer, expects=Causal() if expects is None else expects))
    return [one for one in results if not getattr(one, "what", "").startswith("the order of tokens")]


def test_right_slopes_of_alibi_are_stated():
    (checked,) = list_results(Alibi(RIGHT))
    assert checked.what == "a bias falls with the distance of a key, slopes from 0.00391 to 0.25"
    assert checked.sensitivity.endswith("each head's slope is read, and is that of ALiBi")


def test_learned_slopes_are_not_compared_with_those_of_alibi():
    layer = Alibi(RIGHT.flip(0))
    del layer.slopes
    layer.slopes = torch.nn.Parameter(RIGHT.flip(0))
    (checked,) = list_results(layer)
    assert checked.sensitivity.endswith("each head's slope is read")
