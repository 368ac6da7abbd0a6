import math

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, gamma
from map.map_bounds import MapBounds, map_bounds
from regard import AttentionMap, Causal, ConfigError, Documents, Window, attend
from regard.map import Pyramid, pyramid

Q, K, D, TILE = 150, 130, 8, 16


@pytest.fixture(autouse=True)
def tile_sizes(monkeypatch):
    """Tiles and kept levels small enough for a pyramid of five: two computed a tile at a time, one of them kept in codes."""
    monkeypatch.setattr(pyramid, "TILE", TILE)
    monkeypatch.setattr(pyramid, "KEPT", 40)
    monkeypatch.setattr(pyramid, "CODED", 80)
    monkeypatch.setattr(pyramid, "STRIP", 30)


def both(mask, dtype=torch.float64):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, Q, D, dtype=dtype), torch.randn(2, 2, K, D, dtype=dtype)
    return Pyramid(AttentionMap(q, k, mask), batch=1, head=1), bounds_of(q[1:, 1:], k[1:, 1:], mask)


def bounds_of(q, k, mask):
    """The exact weights (q, k) of one head by attend in float64, and the bounds of what is computed of them in q's dtype."""
    exact, zero = attend(q.double(), k.double(), k.double(), mask).weights[0, 0], torch.zeros(Q, K, dtype=torch.float64)
    if q.dtype == torch.float64:
        return MapBounds(exact, zero, zero + 1e-10)
    allowed = map_bounds(AttentionMap(q.double(), k.double(), mask))
    return MapBounds(exact, allowed.scores[0, 0], allowed.weights[0, 0])


def pixels(weights, level, how):
    """A level by its definition."""
    side = 2**level
    rows = [[weights[i : i + side, j : j + side] for j in range(0, K, side)] for i in range(0, Q, side)]
    return torch.tensor([[float(getattr(block, how)()) for block in row] for row in rows], dtype=weights.dtype)


def pixel_bounds(allowed, level, how):
    """The bounds of a level."""
    return pixels(allowed.weights if how == "max" else allowed.shares, level, how)


def assert_codes_within(codes, weights, allowed):
    """A code is rounded to the nearest: a 2048th of log2 of its weight, from numbers of at most 65535."""
    exact = (65535 + 2048 * weights.log2()).clamp(min=1)
    arithmetic = 2 * gamma(torch.float32, EXPONENTIAL + 3) * 65535
    assert_within(codes.to(torch.int32), exact, 0.5 + 2048 / math.log(2) * allowed / weights + arithmetic)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("mask", [Causal(), Window(9, 4)], ids=repr)
def test_every_tile_of_every_level_is_the_matrix_in_blocks(mask, how, dtype):
    seen, allowed = both(mask, dtype)
    assert seen.levels == 5
    for level in range(seen.levels):
        expected, bound = pixels(allowed.exact, level, how), pixel_bounds(allowed, level, how)
        assert seen.shape(level) == expected.shape
        for row in range(-(-expected.shape[0] // TILE)):
            for column in range(-(-expected.shape[1] // TILE)):
                part = slice(row * TILE, (row + 1) * TILE), slice(column * TILE, (column + 1) * TILE)
                assert_within(seen.tile(level, row, column, how), expected[part], bound[part])


def test_a_lone_strong_weight_stays_in_the_max_of_every_level():
    q, k = torch.zeros(1, 1, Q, 1), torch.zeros(1, 1, K, 1)
    q[0, 0, 77], k[0, 0, 33] = 9.0, 9.0
    seen = Pyramid(AttentionMap(q, k))
    for level in range(seen.levels):
        row, column = 77 >> level, 33 >> level
        assert seen.tile(level, row // TILE, column // TILE, "max")[row % TILE, column % TILE] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize(
    "mask", [Causal(), Window(9, 4), Causal() & Documents(torch.arange(Q) // 7, torch.arange(K) // 7)], ids=repr
)
def test_codes_are_those_of_the_matrix_in_blocks_and_0_where_a_block_is_hidden(mask, how, dtype):
    seen, allowed = both(mask, dtype)
    shown = mask.table(Q, K).reshape(Q, K).to(dtype)
    for level in range(seen.levels):
        expected, anything = pixels(allowed.exact, level, how), pixels(shown, level, "max") > 0
        rows, columns = (-(-side // TILE) for side in expected.shape)
        lines = [torch.cat([seen.codes(level, r, c, how).to(torch.int32) for c in range(columns)], 1) for r in range(rows)]
        found = torch.cat(lines)
        assert torch.equal(found > 0, anything)
        assert_codes_within(found[anything], expected[anything], pixel_bounds(allowed, level, how)[anything])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_visible_weight_of_nothing_has_a_code_and_a_hidden_one_has_none(dtype):
    k = torch.zeros(1, 1, K, 1, dtype=dtype)
    k[0, 0, 0] = 3000.0  # beside which every other weight is 0
    seen = Pyramid(AttentionMap(torch.ones(1, 1, Q, 1, dtype=dtype), k, Causal()))
    for level in range(seen.levels):
        codes = seen.codes(level, 0, 0).to(torch.int32)
        expected = torch.ones_like(codes).tril()
        assert torch.equal(codes.clamp(max=1), expected)
        assert (codes[:, 1:] <= 1).all()


def test_a_nan_is_nothing_to_see_and_leaves_the_other_rows_alone():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, Q, D), torch.randn(1, 1, K, D)
    allowed, below = bounds_of(q, k, Causal()), (slice(2 * TILE + 2, 3 * TILE), slice(TILE))
    q[0, 0, 33] = torch.nan
    found = Pyramid(AttentionMap(q, k, Causal())).codes(0, 2, 0)
    assert not found[1].to(torch.int32).any()
    assert_codes_within(found[2:], allowed.exact[below], allowed.weights[below])


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((5, 0, 0), "at least 0 and below 5, got 5"),
        ((0, 10, 0), "level 0 has 10 tiles along its rows, got row 10"),
        ((3, 0, 2), "level 3 has 2 tiles along its columns, got column 2"),
        ((0, 0, 0, "sum"), "must be one of 'mean', 'max'"),
    ],
)
def test_places_that_are_not_there_say_what_is(place, says):
    with pytest.raises(ConfigError, match=says):
        both(Causal())[0].tile(*place)
