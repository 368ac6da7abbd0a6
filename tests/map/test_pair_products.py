"""Products of pairs of a query and a key are those of their rows, from the compiled loop and from torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, sum_bound
from regard.map.pair_products import LEAST, can_use_loop, multiply_pairs
from skips import NEEDS_LOOPS


def draw_rows(heads, t, width, seed):
    """Rows (t, width) of one of several heads, with a stride of all of them."""
    return torch.randn(t, heads, width, generator=torch.Generator().manual_seed(seed))[:, heads - 1]


def draw_pairs(n, t, s, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, t, (n,), generator=generator), torch.randint(0, s, (n,), generator=generator)


@NEEDS_LOOPS
@given(
    n=st.sampled_from([LEAST, LEAST + 3, 9000]),
    t=st.integers(1, 40),
    s=st.integers(1, 40),
    width=st.integers(1, 70),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_the_compiled_products_are_those_of_the_rows(n, t, s, width, heads, seed):
    q, k, (queries, keys) = draw_rows(heads, t, width, seed), draw_rows(heads, s, width, seed + 1), draw_pairs(n, t, s, seed)
    assert can_use_loop(q, k, queries, keys)
    exact, size = (q.double()[queries] * k.double()[keys] for q, k in ((q, k), (q.abs(), k.abs())))
    assert_within(multiply_pairs(q, k, queries, keys), exact.sum(-1), sum_bound(torch.float32, width) * size.sum(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_few_pairs_are_computed_by_torch(dtype):
    q, k = draw_rows(2, 7, 5, 0), draw_rows(2, 9, 5, 1)
    for rows, n in ((q.to(dtype), LEAST), (q, 3)):
        queries, keys = draw_pairs(n, 7, 9, 2)
        assert not can_use_loop(rows, k.to(rows.dtype), queries, keys)
        assert torch.equal(
            multiply_pairs(rows, k.to(rows.dtype), queries, keys), (rows[queries] * k.to(rows.dtype)[keys]).sum(-1)
        )
