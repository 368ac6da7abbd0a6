"""A bias that is stored by the offsets of pixels is the whole bias, to the bit, whatever is done with it."""

import pytest
import torch
from torch import Tensor

from map.bias_changes import DOUBLE, KEPT, READ
from regard import AttentionMap, Padding
from regard.map.compressed_bias import compress_bias
from regard.map.grid_bias import Grid, GridBias

B, H, D = 2, 3, 5
CLASS_TOKEN, IMAGE, SUBSAMPLED = Grid(1, 5, 8), Grid(0, 7, 11), Grid(0, 13, 10, 3)


def draw_grid(grid: Grid, seed: int = 3, dtype: torch.dtype = DOUBLE) -> Tensor:
    """A bias (B, H, q, k) with a number for each offset of rows and columns, pair by pair, and any for other tokens."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.randn(B, H, 2 * grid.rows, 2 * grid.columns, generator=draw, dtype=DOUBLE).to(dtype)  # by its own indices
    bias = torch.randn(B, H, grid.queries, grid.keys, generator=draw, dtype=DOUBLE).to(dtype)
    pixels = [(y, x) for y in range(grid.rows) for x in range(grid.columns)]
    queries = [(y, x) for y, x in pixels if y % grid.step == 0 == x % grid.step]
    for i, (y, x) in enumerate(queries, grid.first):
        for j, (row, column) in enumerate(pixels, grid.first):
            bias[:, :, i, j] = table[:, :, row - y + grid.rows, column - x + grid.columns]
    return bias


@pytest.mark.parametrize("name", [*KEPT, *READ])
def test_what_is_read_of_a_grid_is_what_the_whole_bias_has(name):
    whole, change = draw_grid(CLASS_TOKEN), (KEPT | READ)[name]
    bias = compress_bias(whole)
    assert isinstance(bias, GridBias)
    found, expected = change(bias), change(whole)
    assert isinstance(found, GridBias) or name not in KEPT
    assert torch.equal(found.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
@pytest.mark.parametrize("grid", [CLASS_TOKEN, IMAGE, SUBSAMPLED])
def test_the_bytes_of_a_grid_are_those_of_its_offsets_and_other_tokens(grid, dtype):
    whole = draw_grid(grid, dtype=dtype)
    bias = compress_bias(whole)
    assert isinstance(bias, GridBias)
    assert bias.grid == grid
    rows, columns = (len({j - i for i in range(0, n, grid.step) for j in range(n)}) for n in (grid.rows, grid.columns))
    others = grid.first * (grid.queries + grid.keys - grid.first)
    assert bias.nbytes == B * H * (rows * columns + others) * whole.element_size()
    assert torch.equal(bias.to_dense(), whole)
    of_heads = compress_bias(whole[:1]).expand(B, -1, -1, -1)
    assert of_heads.nbytes * B == bias.nbytes
    assert torch.equal(of_heads.to_dense(), whole[:1].expand(B, -1, -1, -1))


@pytest.mark.parametrize("where", [(0, 0, 17, 3), (1, 2, 1, 1), (0, 1, 40, 40), (1, 0, 2, 40)])
def test_a_bias_with_one_other_entry_is_kept_whole(where):
    for other in (1e-6, torch.nan, -torch.inf):
        bias = draw_grid(CLASS_TOKEN)
        bias[where] += other
        assert compress_bias(bias) is bias


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("grid", [CLASS_TOKEN, IMAGE, SUBSAMPLED])
def test_a_map_with_a_grid_is_that_of_the_whole_bias(grid, dtype):
    torch.manual_seed(3)
    whole = draw_grid(grid, dtype=dtype)
    q, k = (torch.randn(B, H, n, D, dtype=dtype) for n in (grid.queries, grid.keys))
    mask, softcap = Padding(torch.tensor([grid.keys, grid.keys - 9])), 3.0
    found, expected = (AttentionMap(q, k, mask, bias=x, softcap=softcap) for x in (compress_bias(whole), whole))
    assert isinstance(found.planes.request.bias, GridBias)
    planes = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    for read in (
        AttentionMap.dense,
        lambda m: m[:, 1, 7],
        lambda m: m[0, 0, 3:13, 2:9],
        lambda m: m[*planes, torch.tensor([10, 3, 11]), torch.tensor([5, 0, 1])],
        lambda m: m.tile(slice(3, 12), slice(5, 40), 4),
        lambda m: m.pooled(5, 7),
        AttentionMap.entropy,
        AttentionMap.received,
        lambda m: m.mass(slice(0, 3)),
        lambda m: m.select(batch=[1], heads=[2, 0]).dense(),
        lambda m: m @ torch.ones(B, H, grid.keys, 2, dtype=dtype).cumsum(2),
    ):
        assert torch.equal(read(found), read(expected))
