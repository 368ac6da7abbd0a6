"""Views of positions by strides have the positions of the entries of the view."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.observe.interception.pixels.pixel_positions import locate_entries
from regard.observe.interception.pixels.strided_views import view_by_strides

SIDES = st.integers(1, 4)
BOOLEANS = st.lists(st.booleans(), min_size=3, max_size=3)


def read(x):
    return tuple(x.shape), x.stride(), x.storage_offset()


def draw_positions(shape, constant):
    """Numbers of size 1 along the dimensions that are constant."""
    torch.manual_seed(0)
    return torch.rand([1 if one else size for one, size in zip(constant, shape, strict=False)])


@given(data=st.data(), shape=st.lists(SIDES, min_size=1, max_size=3), constant=BOOLEANS)
def test_any_view_has_the_positions_of_its_entries_or_is_left_to_its_offsets(data, shape, constant):
    numbers = draw_positions(shape, constant)
    x = numbers.expand(shape).contiguous()
    sizes = data.draw(st.lists(SIDES, min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(0, 8), min_size=len(sizes), max_size=len(sizes)))
    room = x.numel() - 1 - sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if room < 0:
        return
    view = x.as_strided(sizes, strides, data.draw(st.integers(0, room)))
    found = view_by_strides(numbers, read(x), read(view))
    index = locate_entries(read(x), read(view), tuple(size > 1 for size in numbers.shape))
    if index is None:
        assert found is None
    else:
        assert torch.equal(numbers[index].expand(sizes), view)
        assert found is None or torch.equal(found, numbers[index])


@given(order=st.permutations(range(4)), constant=BOOLEANS, joined=st.integers(0, 2))
def test_dimensions_that_were_cut_permuted_and_joined_need_no_offsets(order, constant, joined):
    numbers = draw_positions((3, 10, 7), constant)
    x, full = torch.empty(3, 10, 7), numbers.expand(3, 10, 7)
    view, full = (one.unflatten(1, (2, 5)).permute(order) for one in (x, full))
    if view.stride(joined) == view.stride(joined + 1) * view.shape[joined + 1]:  # beside each other in memory
        view, full = view.flatten(joined, joined + 1), full.flatten(joined, joined + 1)
    found = view_by_strides(numbers, read(x), read(view))
    assert found is not None
    assert torch.equal(found.expand(view.shape), full)


def test_entries_outside_and_entries_that_share_memory_are_left_to_their_offsets():
    numbers = torch.rand(2, 3)
    assert view_by_strides(numbers, ((2, 3), (3, 1), 3), ((2,), (1,), 0)) is None
    assert view_by_strides(numbers, ((2, 3), (3, 1), 0), ((2, 3), (3, 1), 3)) is None
    assert view_by_strides(numbers, ((2, 3), (1, 1), 0), ((2,), (1,), 0)) is None
