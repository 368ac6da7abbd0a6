import pytest
import torch

from regard import AttentionMap, Causal, ConfigError, Window, attend
from regard.map import Pyramid, pyramid

Q, K, D, TILE = 150, 130, 8, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles and kept levels small enough for a pyramid of five levels, two of them computed a tile at a time."""
    monkeypatch.setattr(pyramid, "TILE", TILE)
    monkeypatch.setattr(pyramid, "KEPT", 40)


def both(mask, dtype=torch.float64):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, Q, D, dtype=dtype), torch.randn(2, 2, K, D, dtype=dtype)
    return Pyramid(AttentionMap(q, k, mask), batch=1, head=1), attend(q, k, k, mask).weights[1, 1]


def pixels(weights, level, how):
    """A level by its definition."""
    side = 2**level
    rows = [[weights[i : i + side, j : j + side] for j in range(0, K, side)] for i in range(0, Q, side)]
    return torch.tensor([[float(getattr(block, how)()) for block in row] for row in rows], dtype=weights.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("mask", [Causal(), Window(9, 4)], ids=repr)
def test_every_tile_of_every_level_is_the_matrix_in_blocks(mask, how, dtype):
    seen, weights = both(mask, dtype)
    assert seen.levels == 5
    for level in range(seen.levels):
        expected = pixels(weights, level, how)
        assert seen.shape(level) == expected.shape
        for row in range(-(-expected.shape[0] // TILE)):
            for column in range(-(-expected.shape[1] // TILE)):
                part = expected[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                torch.testing.assert_close(seen.tile(level, row, column, how), part, rtol=1e-6, atol=1e-6)


def test_a_lone_strong_weight_stays_in_the_max_of_every_level():
    q, k = torch.zeros(1, 1, Q, 1), torch.zeros(1, 1, K, 1)
    q[0, 0, 77], k[0, 0, 33] = 9.0, 9.0
    seen = Pyramid(AttentionMap(q, k))
    for level in range(seen.levels):
        row, column = 77 >> level, 33 >> level
        assert seen.tile(level, row // TILE, column // TILE, "max")[row % TILE, column % TILE] > 0.99


def test_coarse_levels_cost_one_traversal(monkeypatch):
    seen, _ = both(Causal())
    seen.tile(2, 0, 0)
    monkeypatch.setattr(AttentionMap, "picture", lambda *_: pytest.fail("a second traversal"))
    for level in (2, 3, 4):
        seen.tile(level, 0, 0, "max")


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ((5, 0, 0), "at least 0 and below 5, got 5"),
        ((0, 10, 0), "level 0 has 10 tiles along its rows, got row 10"),
        ((3, 0, 2), "level 3 has 2 tiles along its columns, got column 2"),
        ((0, 0, 0, "sum"), 'must be "mean" or "max"'),
    ],
)
def test_places_that_are_not_there_say_what_is(place, says):
    with pytest.raises(ConfigError, match=says):
        both(Causal())[0].tile(*place)
