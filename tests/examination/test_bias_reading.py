"""The slopes of a bias by distance are read, and those that grow in some heads alone are named."""

import torch
import torch.nn.functional as F

from examination.subjects import case_of
from examination.wrong_calls import H, Rotary, turn_halves
from regard import Causal, Everything, examine
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


class RotaryOfFewerColumns(Rotary):
    """Of queries the first four columns are rotated, of keys all."""

    def place(self, q, k):
        angles = self.angles(q.shape[2])[:, :2].to(q.dtype)
        turned = turn_halves(q[..., :4], angles.cos(), angles.sin())
        return torch.cat((turned, q[..., 4:]), -1), super().place(q, k)[1]


def check_slopes(slopes, layer=Alibi, expects=None):
    torch.manual_seed(0)
    results = check_case(case_of(layer(slopes), expects=Causal() if expects is None else expects))
    return [getattr(one, "what", "") for one in results]


def test_slopes_are_read():
    assert f"a bias falls with the distance of a key, slopes from {SLOPES[-1]:.3g} to 0.5" in check_slopes(SLOPES)
    assert "a bias falls with the distance of a key, slope 0.25" in check_slopes(torch.full((H,), 0.25))


def test_a_head_whose_bias_grows_is_named():
    (what,) = [one for one in check_slopes(SLOPES * torch.tensor([1, 1, -1, 1])) if "bias" in one]
    assert what.startswith("whether the bias of head 2 is meant to grow with the distance of a key")


def test_slopes_on_both_sides_of_a_query_are_read():
    what = f"a bias falls with the distance of a key, slopes from {SLOPES[-1]:.3g} to 0.5"
    assert what in check_slopes(SLOPES, BothWays, Everything())
    torch.manual_seed(0)
    (finding,) = examine(BothWays(-SLOPES), expects=Everything()).findings
    assert finding.kind == "wrong positions"
    assert finding.evidence == "in the layer the bias of every head grows with the distance of a key"


def test_columns_that_are_rotated_in_queries_and_not_in_keys_are_found():
    torch.manual_seed(0)
    (finding,) = check_case(case_of(RotaryOfFewerColumns()))
    assert finding.evidence.endswith("4 columns of queries are rotated, but 6 of keys")
