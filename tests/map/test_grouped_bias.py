"""A bias that is stored by groups of keys is the whole bias, whatever is done with it."""

import pytest
import torch
from torch import Tensor

from map.bias_changes import DOUBLE, KEPT, READ
from map.test_distance_products import are_close
from regard import AttentionMap, Padding
from regard.map.compressed_bias import compress_bias
from regard.map.grouped_bias import GroupedBias

B, H, Q, D = 2, 3, 41, 5
ROWS, COLUMNS = 7, 13
K = ROWS * COLUMNS


def draw_image(first: int = 0, seed: int = 3, size: float = 1.0) -> Tensor:
    """A bias (B, H, Q, first + K): a number for the row of each pixel and one for its column, and any for `first` tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randn(B, H, Q, n, generator=draw, dtype=DOUBLE) * size for n in (ROWS, COLUMNS))
    tokens = torch.randn(B, H, Q, first, generator=draw, dtype=DOUBLE)
    return torch.cat([tokens, (rows.unsqueeze(-1) + columns.unsqueeze(-2)).flatten(-2)], -1)


def draw_segments() -> Tensor:
    """A bias (B, H, Q, K) of one number for each of two segments, which differ from batch row to batch row."""
    draw = torch.Generator().manual_seed(3)
    values, segments = torch.randn(B, H, Q, 2, generator=draw, dtype=DOUBLE), torch.randint(2, (B, K), generator=draw)
    return values.gather(-1, segments.view(B, 1, 1, K).expand(B, H, Q, K))


@pytest.mark.parametrize("name", [*KEPT, *READ])
@pytest.mark.parametrize("draw", [draw_image, draw_segments])
def test_what_is_read_of_groups_is_what_the_whole_bias_has(draw, name):
    whole, change = draw(), (KEPT | READ)[name]
    bias = compress_bias(whole)
    assert isinstance(bias, GroupedBias)
    found, expected = change(bias), change(whole)
    assert isinstance(found, GroupedBias) or name not in KEPT
    found = found.to_dense()
    assert are_close(found, expected) or (name == "another precision" and (found - expected).abs().max() <= 0.05)


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_bytes_of_an_image_are_those_of_its_rows_and_columns(dtype, first, size):
    whole = draw_image(first, size=size).to(dtype)
    bias = compress_bias(whole)
    assert isinstance(bias, GroupedBias)
    assert bias.nbytes == B * H * Q * (ROWS + COLUMNS + 2 * first) * whole.element_size() + 2 * (K + first) * 8
    assert (bias.to_dense() - whole).abs().max() <= 4 * torch.finfo(dtype).eps * whole.abs().max()


@pytest.mark.parametrize("where", [(0, 0, 17, 3), (1, 2, 0, 0), (0, 1, Q - 2, K - 1)])
@pytest.mark.parametrize("draw", [draw_image, draw_segments])
def test_a_bias_with_one_other_entry_is_kept_whole(draw, where):
    for other in (1e-6, torch.nan, -torch.inf):
        bias = draw()
        bias[where] += other
        assert compress_bias(bias) is bias


@pytest.mark.parametrize("hidden", [(slice(-2, None), slice(None)), (slice(None), 0), (0, slice(None))])
def test_a_bias_whose_hidden_keys_have_large_numbers_is_read_as_exactly_as_the_others(hidden):
    others = torch.randn(B, H, Q, ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    others[(..., *hidden)] = -1e9
    bias = others.flatten(-2)
    assert compress_bias(bias) is bias
    sums = draw_image().float().unflatten(-1, (ROWS, COLUMNS))
    sums[(..., *hidden)] = -1e9
    whole = sums.flatten(-2)
    difference = (compress_bias(whole).to_dense() - whole).abs()
    assert difference[whole > -1e9].max() <= 1e-5


@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_map_with_groups_is_that_of_the_whole_bias(dtype, size):
    torch.manual_seed(3)
    q, k, whole = torch.randn(B, H, Q, D), torch.randn(B, H, K, D), draw_image(size=size).to(dtype)
    mask, softcap = Padding(torch.tensor([K, K - 9])), 3.0
    found, expected = (
        AttentionMap(q.to(dtype), k.to(dtype), mask, bias=x, softcap=softcap) for x in (compress_bias(whole), whole)
    )
    tolerance = 1e-12 if dtype == DOUBLE else 2e-5 * size
    planes = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    for read in (
        AttentionMap.dense,
        lambda m: m[:, 1, 7],
        lambda m: m[0, 0, 3:33, 2:9],
        lambda m: m[*planes, torch.tensor([40, 3, 11]), torch.tensor([5, 0, 1])],
        lambda m: m.tile(slice(3, 20), slice(5, 40), 4),
        lambda m: m.pooled(5, 7),
        AttentionMap.entropy,
        AttentionMap.received,
        lambda m: m.mass(slice(0, 3)),
        lambda m: m.select(batch=[1], heads=[2, 0]).dense(),
        lambda m: m @ torch.ones(B, H, K, 2, dtype=dtype).cumsum(2),
    ):
        ours, theirs = read(found), read(expected)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)
