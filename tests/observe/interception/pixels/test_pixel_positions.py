"""Positions of pixels: whatever a model does to its tokens, the key that moves with a patch is the one at its place."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regard import record
from regard.observe.interception.pixels.pixel_positions import PixelPositions, locate_entries
from run_limits import limit_examples

SIDE = 3  # pixels of a patch
FEW = settings(max_examples=limit_examples(8), deadline=None)
MOST = 4  # patches that are changed, of an image with more


class Attention(nn.Module):
    """Attention of 2 heads among tokens (b, t, 8), by hand or not, of all or of the largest of each `pool` queries."""

    def __init__(self, pool=1, by_hand=False):
        super().__init__()
        self.qkv, self.out, self.pool, self.by_hand = nn.Linear(8, 24), nn.Linear(8, 8), pool, by_hand

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q = q if self.pool == 1 else q.unflatten(2, (-1, self.pool)).amax(3)
        y = (q @ k.mT / 2).softmax(-1) @ v if self.by_hand else F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, 8))


class Regrouped(nn.Module):
    """Attention among groups of patches, and then among all in the order that these groups leave, or in that of the rows.

    Patches are cut by a function, so that no module tells of them; group and ungroup map tokens (b, rows, columns, 8) to
    (n, t, 8) and back.
    """

    def __init__(self, group, ungroup=None, by_hand=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, SIDE, SIDE))
        self.first, self.second = Attention(by_hand=by_hand), Attention(by_hand=by_hand)
        self.group, self.ungroup, self.norm = group, ungroup, nn.LayerNorm(8)

    def cut(self, pixels):
        return F.conv2d(pixels, self.weight, stride=SIDE)

    def forward(self, pixels):
        x = self.cut(pixels).permute(0, 2, 3, 1)
        sides = x.shape[1:3]
        grouped = self.group(self.norm(x))
        y = grouped + self.first(grouped)
        if self.ungroup is None:
            return self.second(y.reshape(len(x), -1, 8))
        return self.second((x + self.ungroup(y, *sides)).flatten(1, 2))


def cut_windows(down, across):
    """Functions that cut tokens into windows of down x across neighbors, and put them back."""

    def group(x):
        x = x.unflatten(2, (-1, across)).unflatten(1, (-1, down))
        return x.transpose(2, 3).reshape(-1, down * across, 8)

    def ungroup(x, rows, columns):
        x = x.reshape(-1, rows // down, columns // across, down, across, 8)
        return x.transpose(2, 3).reshape(-1, rows, columns, 8)

    return group, ungroup


def dilate_windows(down, across):
    """Functions that group every n-th token of each axis, down x across of them, and put them back."""

    def group(x):
        x = x.unflatten(2, (across, -1)).unflatten(1, (down, -1))
        return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, down * across, 8)

    def ungroup(x, rows, columns):
        x = x.reshape(-1, rows // down, columns // across, down, across, 8)
        return x.permute(0, 3, 1, 4, 2, 5).reshape(-1, rows, columns, 8)

    return group, ungroup


def record_run(model, pixels):
    with torch.no_grad(), record(model) as recording:
        model(pixels)
    return recording


def check_patches(model, pixels, layer="first"):
    """Check that of patches the key at its place moves with its pixels, and no other; return the grid."""
    model = model.double().eval()
    before = record_run(model, pixels)
    (grid,) = before.axis_places(layer)[1]
    assert (grid.rows, grid.columns) == (pixels.shape[2] // SIDE, pixels.shape[3] // SIDE)
    k = before[layer][0].map.planes.request.k
    patches = torch.randperm(grid.rows * grid.columns, generator=torch.Generator().manual_seed(grid.rows))[:MOST].tolist()
    for row, column in (divmod(patch, grid.columns) for patch in patches):
        changed = pixels.clone()
        changed[..., row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] += 1
        moved = (record_run(model, changed)[layer][0].map.planes.request.k != k).any(3).any(1)
        window, token = grid.find_token(row, column, k.shape[2])
        assert moved.nonzero().tolist() == [[image * grid.windows + window, token] for image in range(len(pixels))]
    return grid


@FEW
@given(
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cut=st.sampled_from([cut_windows, dilate_windows]),
    by_hand=st.booleans(),
    images=st.integers(1, 2),
)
def test_windows_of_any_sides_have_their_places_dilated_or_not(counts, window, cut, by_hand, images):
    if counts == window == (1, 1):
        return  # one patch is no grid
    torch.manual_seed(0)
    sides = [SIDE * n * side for n, side in zip(counts, window, strict=True)]
    group, ungroup = cut(*window)
    pixels = torch.randn(images, 3, *sides, dtype=torch.float64)
    for model in (Regrouped(group, ungroup, by_hand), Regrouped(group, None, by_hand)):
        nn.init.zeros_(model.first.out.weight)  # so that a key of the second layer is of one patch too
        check_patches(model, pixels)
        check_patches(model, pixels, "second")


@FEW
@given(order=st.permutations(range(12)), by_hand=st.booleans())
def test_tokens_in_any_order_have_their_places(order, by_hand):
    torch.manual_seed(0)
    model = Regrouped(lambda x: x.flatten(1, 2)[:, list(order)], by_hand=by_hand)
    grid = check_patches(model, torch.randn(2, 3, 9, 12, dtype=torch.float64))
    assert grid.locate_tokens(12).tolist() == [order]


@FEW
@given(orders=st.tuples(*[st.permutations(range(6))] * 2), way=st.sampled_from([list, torch.tensor]), by_hand=st.booleans())
def test_layers_that_order_the_same_patches_otherwise_have_places_of_their_own(orders, way, by_hand):
    torch.manual_seed(0)

    class Twice(Regrouped):
        def forward(self, pixels):
            x = self.cut(pixels).flatten(2).mT
            return self.first(x[:, way(orders[0])]) + self.second(x[:, way(orders[1])])

    model = Twice(None, by_hand=by_hand)
    for layer in ("first", "second"):
        check_patches(model, torch.randn(1, 3, 6, 9, dtype=torch.float64), layer)


def test_shifted_and_padded_tokens_beside_others_have_their_places():
    torch.manual_seed(0)

    def group(x):
        x = F.pad(x.roll((-1, -2), (1, 2)), (0, 0, 0, 1, 0, 2))  # 5 x 7 patches to 7 x 8
        x = cut_windows(7, 4)[0](x)
        return torch.cat([x.new_ones(len(x), 2, 8), x, x.new_zeros(len(x), 1, 8)], 1)

    model = Regrouped(group, ungroup=lambda x, rows, columns: x.new_zeros(1, rows, columns, 8))
    grid = check_patches(model, torch.randn(1, 3, 15, 21, dtype=torch.float64))
    assert (grid.windows, grid.start) == (2, 2)


def test_units_that_are_pooled_by_their_queries_are_patches_of_a_coarser_grid():
    torch.manual_seed(0)

    class Pooled(Regrouped):
        def forward(self, pixels):
            x = self.group(self.cut(pixels).permute(0, 2, 3, 1)).reshape(len(pixels), -1, 8)
            return self.second(x.unflatten(1, (-1, 4)).amax(2) + self.first(x))

    model = Pooled(cut_windows(2, 2)[0]).double().eval()
    model.first.pool = 4
    pixels = torch.randn(2, 3, 12, 24, dtype=torch.float64)
    fine = check_patches(model, pixels)
    assert not fine.has_queries
    (coarse,) = record_run(model, pixels).axis_places("second")[1]
    assert (coarse.rows, coarse.columns, coarse.order, coarse.has_queries) == (2, 4, None, True)


LOSES_PLACES = {
    "sorted by values": lambda x: x.flatten(1, 2).sort(1).values,
    "mixed by a product": lambda x: torch.randn(12, 12, dtype=x.dtype) @ x.flatten(1, 2),
    "running sums": lambda x: x.flatten(1, 2).cumsum(1),
    "scattered by a mask": lambda x: torch.zeros_like(x).masked_scatter(torch.ones_like(x).bool(), x).flatten(1, 2),
    "means of distant patches": lambda x: (x.flatten(1, 2) + x.flatten(1, 2).flip(1)) / 2,
    "one of them twice": lambda x: x.flatten(1, 2)[:, [0, *range(11)]],
    "a part of them": lambda x: x.flatten(1, 2)[:, :7],
    "of another order in each image": lambda x: torch.stack([x[0].flatten(0, 1), x[1].flatten(0, 1).flip(0)]),
    "images in turns": lambda x: x.flatten(1, 2).transpose(0, 1).reshape(2, 12, 8),
    "channels for tokens": lambda x: x.flatten(1, 2).mT.reshape(2, 12, 8),
    "written over": lambda x: x.flatten(1, 2).clone().copy_(torch.randn(2, 12, 8, dtype=x.dtype)),
}


@pytest.mark.parametrize("name", LOSES_PLACES)
def test_tokens_that_are_no_patches_any_more_have_no_places(name):
    torch.manual_seed(0)
    model = Regrouped(LOSES_PLACES[name]).double().eval()
    pixels = torch.randn(2, 3, 9, 12, dtype=torch.float64)
    model.second = nn.Identity()
    assert record_run(model, pixels).places is None


@pytest.mark.parametrize("name", ["one of them twice", "of another order in each image", "images in turns"])
def test_tokens_that_were_followed_are_not_taken_for_patches_by_their_number(name):
    torch.manual_seed(0)
    model = Regrouped(LOSES_PLACES[name]).double().eval()
    model.patches, model.second = nn.Conv2d(3, 8, SIDE, SIDE).double(), nn.Identity()
    model.cut = model.patches
    assert record_run(model, torch.randn(2, 3, 9, 12, dtype=torch.float64)).places is None


@FEW
@given(data=st.data())
def test_a_view_has_the_positions_of_its_entries(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    x, positions = torch.randn(shape), PixelPositions()
    numbers = torch.complex(*torch.rand(2, *shape, dtype=torch.float64)) + 1
    constant = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    numbers = numbers[tuple(slice(1) if one else slice(None) for one in constant)]
    positions.put(x, numbers)
    full = numbers.expand(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.integers(0, x.dim() - 1))
        step = data.draw(st.sampled_from(["transpose", "narrow", "unflatten", "flatten", "select", "expand"]))
        if step == "transpose":
            x, full = (one.transpose(0, dim) for one in (x, full))
        elif step == "narrow":
            start = data.draw(st.integers(0, x.shape[dim] - 1))
            x, full = (one.narrow(dim, start, one.shape[dim] - start) for one in (x, full))
        elif step == "unflatten" and x.shape[dim] % 2 == 0:
            x, full = (one.unflatten(dim, (2, -1)) for one in (x, full))
        elif step == "flatten" and x.is_contiguous():
            x, full = x.flatten(), full.flatten()
        elif step == "select" and x.dim() > 1:
            x, full = (one.select(dim, 0) for one in (x, full))
        elif step == "expand":
            x, full = (one[None].expand(2, *one.shape) for one in (x, full))
    found = positions.find(x)
    assert found is not None
    assert torch.equal(found.expand(x.shape), full)


def test_a_view_whose_rows_are_of_another_length_has_the_position_that_all_entries_share():
    x, positions = torch.randn(2, 3, 2), PixelPositions()
    numbers = torch.rand(2, 1, 1, dtype=torch.float64).to(torch.complex128) + 1
    positions.put(x, numbers)
    found = positions.find(x.flatten(1).unflatten(1, (2, 3)))
    assert found is not None
    assert torch.equal(found.expand(2, 2, 3), numbers.expand(2, 2, 3))


def test_positions_of_memory_that_was_freed_are_those_of_no_other_tensor():
    positions = PixelPositions()
    for _ in range(50):
        x = torch.randn(1, 3, 8, 8)
        assert not positions.has(x)
        positions.start(x)
        assert positions.has(x)
        del x


class Stem(nn.Module):
    """Patches of an image as tokens (b, 4, 8), which a layer attends to in a way of its own."""

    def __init__(self, attend):
        super().__init__()
        self.cut, self.linear, self.attend = nn.Conv2d(3, 8, SIDE, SIDE), nn.Linear(8, 8), attend

    def forward(self, pixels):
        return self.attend(self.linear, self.cut(pixels).flatten(2).mT)


def attend_to_mean(linear, x):
    q = x.unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, linear(x).unflatten(2, (2, 4)).transpose(1, 2).mean(1, keepdims=True).expand_as(q), q
    )


def attend_to_rows(linear, x):
    y = torch.func.vmap(linear)(x)
    return F.scaled_dot_product_attention(y[:, None], y[:, None], x[:, None])


@pytest.mark.parametrize("attend", [attend_to_mean, attend_to_rows])
def test_attention_is_recorded_whatever_happens_to_positions(attend):
    run = record_run(Stem(attend), torch.randn(2, 3, 2 * SIDE, 2 * SIDE))
    assert len(run.calls) == 1
    assert not run.missed


def test_queries_that_start_as_zeros_of_the_shape_of_patches_have_no_place():
    def attend(linear, x):
        keys = linear.weight[:4] + torch.zeros_like(x[:, [2, 0, 3, 1]])
        return F.scaled_dot_product_attention(x[:, None], keys[:, None], x[:, None])

    assert not find_positions_of_keys(record_run(Stem(attend), torch.randn(2, 3, 2 * SIDE, 2 * SIDE)))


def find_positions_of_keys(run):
    return [k for _, k in run.last.positions.values() if k is not None]


def test_nothing_of_a_forward_stays_after_it():
    record_run(Regrouped(*cut_windows(2, 2)), torch.randn(2, 3, 4 * SIDE, 4 * SIDE))
    assert not locate_entries.cache_info().currsize
