"""Masks that layers share are inferred once in a forward, and only if their bits are the same."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard import record
from regard.observe.interception.forward_cache import have_same_bits


class Masked(nn.Module):
    """Attention under a mask of its own, which is a table."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x):
        y = x.unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y, self.mask).squeeze(1)


def test_layers_with_equal_masks_of_their_own_share_one_rule_and_others_do_not():
    table = torch.rand(5, 5) < 0.5
    table.fill_diagonal_(True)
    tables = [table, table.clone(), ~table | torch.eye(5).bool(), table.clone()]
    model = nn.Sequential(*map(Masked, tables))
    with record(model) as recording:
        model(torch.randn(2, 5, 6))
    rules = [call.map.planes.request.mask for call in recording.calls]
    for rule, expected in zip(rules, tables, strict=True):
        assert torch.equal(rule.table(5, 5), expected)
    assert rules[0].given is rules[1].given is rules[3].given


@given(
    dtype=st.sampled_from([torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128]),
    start=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    sides=st.tuples(st.integers(1, 4), st.integers(1, 16)),
    changed=st.none() | st.integers(0, 63),
    is_turned=st.booleans(),
)
def test_bits_are_compared_as_numbers_are_whatever_the_dtype_and_the_layout(dtype, start, sides, changed, is_turned):
    table = torch.randint(0, 2, (16, 32), generator=torch.Generator().manual_seed(0)).to(dtype)
    x = table[start[0] : start[0] + sides[0], start[1] : start[1] + sides[1]]
    x = x.mT if is_turned else x
    y = x.clone()
    assert have_same_bits(x, y)
    assert not have_same_bits(x, y[:, 1:])
    if changed is not None and changed < x.numel():
        place = divmod(changed, x.shape[1])
        y[place] = (y[place] == 0).to(dtype)
        assert not have_same_bits(x, y)
