"""A bias that is stored by its diagonals is the whole bias, to the bit, whatever is done with it."""

import copy
import operator

import pytest
import torch
from torch import Tensor

from regard import AttentionMap, Causal
from regard.map.compressed_bias import compress_bias
from regard.map.relative_bias import RelativeBias

B, H, Q, K, D = 2, 3, 41, 53, 5


def draw_bias(batch: int = 1, heads: int = H) -> Tensor:
    """A bias (batch, heads, Q, K) of random diagonals, as a tensor of its own."""
    drawn = torch.randn(batch, heads, Q + K - 1, generator=torch.Generator().manual_seed(5))
    return drawn[..., torch.arange(K) - torch.arange(Q).unsqueeze(-1) + Q - 1].contiguous()


ROWS, COLUMNS = torch.tensor([3, 0, Q - 1, -2]), torch.tensor([7, K - 1, -3, 0])
KEPT = {  # what still is stored by its diagonals
    "slices": lambda x: x[:, 1:, 5:, :-7],
    "a row of heads": lambda x: x[:, 2],
    "heads by number": lambda x: x[:, (2, 0)],
    "one matrix, expanded": lambda x: x[0, 1].expand(Q, K),
    "all batch rows": lambda x: x.expand(4, H, Q, K),
    "planes by number": lambda x: x[torch.zeros(4, dtype=torch.long), torch.tensor([0, 2, 1, 1])],
    "another precision": lambda x: x.double(),
    "a copy": torch.clone,
    "a deep copy": copy.deepcopy,
}
READ = {
    "entries": lambda x: x[0, 1][ROWS, COLUMNS],
    "entries that broadcast": lambda x: x[0, 1][ROWS.unsqueeze(-1), COLUMNS],
    "entries of planes": lambda x: x[torch.tensor([0, 0, 0, 0]), torch.tensor([2, 1, 0, 2]), ROWS, COLUMNS],
    "rows": lambda x: x[0, 1][ROWS],
    "rows of all heads": lambda x: x[:, :, ROWS],
    "one row": lambda x: x[:1, :, -1:],
    "a bool index": lambda x: x[0, 1][ROWS.new_ones(Q).bool()],
    "every third key": lambda x: x[..., ::3],
    "an empty slice": lambda x: x[..., 5:5],
    "a sum": lambda x: x + 1,
    "a sum in place": lambda x: torch.zeros(1, H, Q, K).add_(x),
    "a slice of a sum": lambda x: operator.iadd(torch.ones(6, 4), x[0, 1][2:8, 1:5]),
    "a comparison": lambda x: x != -torch.inf,
    "the largest": torch.amax,
    "its transpose": lambda x: x.mT,
    "joined": lambda x: torch.cat([x, x], 1),
    "written elsewhere": lambda x: torch.zeros(1, H, Q, K + 2).index_put_((torch.tensor([0]),), torch.cat([x, x[..., :2]], -1)),
}


@pytest.mark.parametrize("name", [*KEPT, *READ])
def test_what_is_read_of_a_relative_bias_is_what_the_whole_bias_has(name):
    whole, change = draw_bias(), (KEPT | READ)[name]
    bias = compress_bias(whole)
    assert isinstance(bias, RelativeBias)
    assert bias.nbytes == H * (Q + K - 1) * 4
    found, expected = change(bias), change(whole)
    assert isinstance(found, RelativeBias) or name not in KEPT
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(found.to_dense(), expected)


@pytest.mark.parametrize("where", [(0, 0, 17, 3), (0, 2, 0, 0), (0, 1, Q - 1, K - 1), (0, 0, Q - 1, 1), (0, 0, 1, 1)])
def test_a_bias_with_one_other_entry_is_kept_whole(where):
    bias = draw_bias()
    bias[where] += 1
    assert compress_bias(bias) is bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_map_with_a_relative_bias_is_that_of_the_whole_bias(dtype):
    torch.manual_seed(3)
    q, k, bias = torch.randn(B, H, Q, D), torch.randn(B, H, K, D), draw_bias()
    given = {"mask": Causal(), "offset": K - Q, "softcap": 3.0}
    found, expected = (AttentionMap(q.to(dtype), k.to(dtype), bias=x, **given) for x in (compress_bias(bias), bias))
    numbers = H * (Q * K - Q - K + 1)
    assert expected.nbytes - found.nbytes == numbers * (8 if dtype == torch.float64 else 4)
    for read in (
        AttentionMap.dense,
        lambda m: m[:, 1, 7],
        lambda m: m[torch.tensor([0, 1]), 2, torch.tensor([40, 3]), torch.tensor([5, 0])],
        lambda m: m.tile(slice(3, 20), slice(5, 40), 4),
        lambda m: m.top(3)[0],
        lambda m: m.overview().entropy,
        lambda m: m.received(),
        lambda m: m @ torch.ones(B, H, K, 2),
    ):
        assert torch.equal(read(found), read(expected))
