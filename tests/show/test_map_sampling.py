import torch

from regard import AttentionMap, Causal
from regard.map.pooling import bin_edges
from regard.show.map_sampling import pool_cells


def some(q=53, k=53):
    sides = (torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (q, k))
    return AttentionMap(*sides, Causal())


def test_a_quick_map_is_pooled_whole_in_its_first_batch_row():
    found, sampled = pool_cells(some(), 11)
    assert not sampled
    pooled = some().pooled(11, 11, "max")[0].double()
    assert torch.equal(found.nan_to_num(0), pooled)
    assert torch.equal(found.isnan(), pooled == 0)


def test_a_long_one_shows_the_last_query_of_each_bin_and_the_largest_weight_of_each_of_keys():
    found, sampled = pool_cells(some(), 11, quick=100)
    assert sampled
    dense, ends = some().dense()[0].double(), bin_edges(0, 53, 11).tolist()
    for row in range(11):
        for column in range(11):
            expected = dense[:, ends[row + 1] - 1, ends[column] : ends[column + 1]].amax(-1)
            torch.testing.assert_close(found[:, row, column].nan_to_num(0), expected, atol=1e-12, rtol=0)
