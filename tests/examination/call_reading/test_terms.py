"""More keys than queries are those of a cache where the queries are the last ones, not in cross attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_sources import C, Cross, H, join, split
from regard import Everything, examine

BEFORE = 3


class CrossByHand(Cross):
    """Cross attention that is written out, which no kernel or name tells from a cache."""

    def forward(self, x, context):
        q, k, v = map(split, self.project(x, context))
        return self.to_out(join((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v))


class Continued(nn.Module):
    """Causal attention after tokens that are kept."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, C) for _ in range(3))
        self.register_buffer("kept", torch.randn(1, BEFORE, C))

    def forward(self, x):
        every = torch.cat((self.kept.expand(len(x), -1, -1), x), 1)
        seen = torch.ones(x.shape[1], every.shape[1], dtype=torch.bool).tril(BEFORE)
        q, k, v = split(self.q_proj(x)), split(self.k_proj(every)), split(self.v_proj(every))
        return join(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def list_checked(layer, **options):
    return [one.what for one in examine(layer, **options).checked]


@pytest.mark.parametrize("layer", [Cross, CrossByHand])
def test_keys_of_another_sequence_are_no_cache(layer):
    torch.manual_seed(0)
    what = list_checked(layer(), expects=Everything(), sample=(torch.randn(2, 6, C), torch.randn(2, 6 + BEFORE, C)))
    assert f"heads are independent: {H} of width {C // H}" in what
    assert not any("cache" in one for one in what)


def test_keys_before_the_first_query_are_those_of_a_cache():
    torch.manual_seed(0)
    assert f"{BEFORE} keys before the first query, as of a cache" in list_checked(Continued(), sample=torch.randn(2, 6, C))
