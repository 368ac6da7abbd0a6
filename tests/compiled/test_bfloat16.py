"""Rows of bfloat16 and the tiles that multiply pairs of them, against torch's rounding and numpy's products."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

numba = pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from bounds import assert_within, sum_bound  # noqa: E402
from regard.compiled import bfloat16, register_tiles  # noqa: E402
from regard.compiled.register_tiles import COLUMNS, ROWS  # noqa: E402
from run_limits import limit_examples  # noqa: E402


@numba.njit
def put(x, at, factor, out, to, count):
    bfloat16.store_scaled_row(x, at, factor, out, to, count)


@numba.njit
def pack_pairs(x, at, y, other, out, to, count):
    bfloat16.pack_row_pairs(x, at, y, other, out, to, count)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=90, max_size=90),
    st.integers(0, 70),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([1.0, -0.7]),
)
@settings(max_examples=limit_examples(200), deadline=None)
def test_a_row_is_rounded_as_torch_rounds_it_and_nothing_beside_it_is_touched(bits, count, at, to, factor):
    x = np.array(bits, np.uint32).view(np.float32)
    out = np.full(90, 7, np.uint16)
    put(x, at, np.float32(factor), out, to, count)
    expected = (torch.from_numpy(x) * np.float32(factor))[at : at + count].bfloat16()
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)[to : to + count]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert (np.delete(out, np.s_[to : to + count]) == 7).all()
    same = np.full(90, 7, np.float32)
    put(x, at, np.float32(factor), same, to, count)
    with np.errstate(invalid="ignore"):  # a signalling NaN among the bits
        np.testing.assert_array_equal(same[to : to + count], x[at : at + count] * np.float32(factor))


def test_a_nan_whose_bits_are_all_set_stays_one():
    out = np.zeros(20, np.uint16)
    put(np.full(20, 2**32 - 1, np.uint32).view(np.float32), 0, np.float32(1), out, 0, 20)
    assert torch.from_numpy(out.view(np.int16)).view(torch.bfloat16).isnan().all()


@given(st.integers(0, 70), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
@settings(deadline=None)
def test_of_a_pair_the_first_is_the_lower_half(count, at, other, to):
    x, y = (np.arange(start, start + 90, dtype=np.uint16) for start in (0, 2**16 - 90))
    out = np.full(90, 7, np.uint32)
    pack_pairs(x, at, y, other, out, to, count)
    np.testing.assert_array_equal(
        out[to : to + count].view(np.uint16).reshape(-1, 2), np.stack([x[at : at + count], y[other : other + count]], 1)
    )
    assert (np.delete(out, np.s_[to : to + count]) == 7).all()


@pytest.mark.parametrize("by_the_processor", [True, False])
@pytest.mark.parametrize("onto", [True, False])
def test_a_tile_of_pairs_is_the_product_of_their_numbers(by_the_processor, onto, monkeypatch):
    if by_the_processor and not register_tiles.MULTIPLIES_PAIRS:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    monkeypatch.setattr(register_tiles, "MULTIPLIES_PAIRS", by_the_processor)
    tile = register_tiles.accumulate_tile if onto else register_tiles.multiply_tile

    @numba.njit
    def product(a, b, out):
        tile(a, 3, 40, 2, b, COLUMNS, 19, out, 5, COLUMNS + 1)

    torch.manual_seed(0)
    a, b = torch.randn(ROWS, 19, 2).bfloat16(), torch.randn(19, COLUMNS, 2).bfloat16()
    places = np.zeros(3 + ROWS * 40, np.uint32)
    places[3:].reshape(ROWS, 40)[:, : 2 * 19 : 2] = words(a)
    panels = np.concatenate([np.full((1, COLUMNS), 99, np.uint32), words(b)])
    out = np.ones(5 + ROWS * (COLUMNS + 1), np.float32)
    product(places, panels, out)
    a, b = a.double(), b.double()
    expected, size = (torch.einsum("rpt,pct->rc", *pair) + onto for pair in ((a, b), (a.abs(), b.abs())))
    found = torch.from_numpy(out[5:].reshape(ROWS, COLUMNS + 1)[:, :COLUMNS])
    assert_within(found, expected, sum_bound(torch.float32, 2 * 19 + onto) * size)
    assert (out[:5] == 1).all()
    assert (out[5:].reshape(ROWS, COLUMNS + 1)[:, COLUMNS] == 1).all()


def words(pairs):
    """Pairs of bfloat16 as numbers of 32 bits."""
    return pairs.contiguous().view(torch.int16).numpy().view(np.uint32)[..., 0]
