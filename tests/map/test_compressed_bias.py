"""Entries of keys that are hidden do not decide in which form a bias is stored."""

import pytest
import torch
from torch import Tensor

from map.bias_changes import DOUBLE
from map.test_distance_products import B, H, Q
from regard.map.compressed_bias import compress_bias
from regard.map.computed_bias import ComputedBias

K = 2 * Q  # Q tokens, and behind them one of its own for each query
QUERIES, KEYS = torch.arange(Q).unsqueeze(-1), torch.arange(K)
VISIBLE = torch.where(KEYS < Q, KEYS <= QUERIES, KEYS == QUERIES + Q)


def draw_streams(seed: int = 3) -> Tensor:
    """A bias (B, H, Q, K) of one number of each query for each of four spans of distances, and of its own key behind."""
    numbers = torch.randn(B, H, Q, 5, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    buckets = torch.bucketize(QUERIES - KEYS % Q, torch.tensor([2, 5, 9])).where(KEYS < Q, 4)
    return numbers.gather(-1, buckets.expand(B, H, -1, -1))


@pytest.mark.parametrize("others", ["those of distances", "0", "random"])
def test_a_bias_is_stored_by_what_of_it_is_not_hidden(others):
    whole = draw_streams()
    fill = {"those of distances": whole, "0": 0.0, "random": torch.randn(B, H, Q, K, dtype=DOUBLE)}[others]
    bias = torch.where(VISIBLE, whole, fill)
    assert compress_bias(bias) is bias
    for hidden in (~VISIBLE[None, None], (~VISIBLE).expand(B, 1, Q, K)):
        found = compress_bias(bias, hidden)
        assert isinstance(found, ComputedBias)
        assert found.nbytes * 4 < bias.nbytes
        assert torch.equal(found.to_dense().where(VISIBLE, 0), whole.where(VISIBLE, 0))


def test_a_bias_that_has_other_visible_entries_is_kept_whole_or_has_these():
    bias, hidden = draw_streams(), ~VISIBLE[None, None]
    bias[1, 2, 17, 3] += 1
    assert torch.equal(compress_bias(bias, hidden).to_dense().where(VISIBLE, 0), bias.where(VISIBLE, 0))
    bias = bias + torch.randn(1, H, Q, K, dtype=DOUBLE)
    assert compress_bias(bias, hidden) is bias
    of_one = draw_streams()[:1].contiguous()
    assert compress_bias(of_one, (~VISIBLE).expand(B, 1, Q, K)) is of_one  # hidden for each batch row of its own
