"""Masks that layers share are inferred once in a forward, and only if their bits are the same."""

import torch
import torch.nn.functional as F
from torch import nn

from regard import record


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
