"""What queries and keys were made from is followed through functions that take their tensors in lists."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.observe import record

JOINED = {
    "memory beside itself": (lambda x, memory: torch.cat([memory, memory], 1), "cross"),
    "memory by name": (lambda x, memory: torch.cat(tensors=(memory, memory), dim=1), "cross"),
    "memory after the queries' own": (lambda x, memory: torch.cat([x, memory], 1), "self"),
    "memory, of which only the first is taken": (lambda x, memory: torch.stack([memory, memory])[0], "cross"),
    "memory times a matrix": (lambda x, memory: torch.einsum("btc,cd->btd", [memory, torch.eye(8)]), "cross"),
}


class Reads(nn.Module):
    """Attention to what some function makes of the queries' input and of a memory."""

    def __init__(self, joined):
        super().__init__()
        self.q, self.k, self.joined = nn.Linear(8, 8), nn.Linear(8, 8), joined

    def forward(self, x, memory):
        q, k = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.q(x), self.k(self.joined(x, memory))))
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize(("joined", "kind"), JOINED.values(), ids=list(JOINED))
def test_what_was_joined_in_a_list_is_where_keys_come_from(joined, kind):
    model = Reads(joined)
    with record(model) as recording:
        model(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    assert [call.kind for call in recording.calls] == [kind]
