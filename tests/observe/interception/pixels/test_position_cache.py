"""What was computed of positions is found again for the same arguments, and for no others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.observe.interception.pixels.position_cache import PositionCache, describe_arguments

NUMBERS = st.lists(st.integers(0, 1), min_size=6, max_size=6)
ARGUMENTS = st.recursive(
    st.none() | st.integers(0, 1) | st.booleans() | st.sampled_from([0.0, 1.0, "a", ..., slice(None), slice(0, 1), slice(1)]),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner, inner),
    max_leaves=4,
)


@given(rows=st.lists(NUMBERS, max_size=9), is_turned=st.booleans())
def test_positions_with_the_same_layout_and_numbers_are_the_same_object(rows, is_turned):
    cache, found = PositionCache(), []
    for row in rows:
        positions = torch.tensor(row).view(2, 3)
        positions = positions.T if is_turned else positions
        shared = cache.share(positions)
        assert torch.equal(shared, positions)
        assert shared.stride() == positions.stride()
        assert cache.share(shared) is shared
        found.append(shared)
    assert len({*map(id, found)}) == len({*map(tuple, rows)})


def test_what_was_computed_is_computed_once_until_all_is_forgotten():
    cache, calls = PositionCache(), []
    for key in ("a", "b", "a"):
        assert cache.compute_once(key, lambda key=key: calls.append(key) or key) == key
    assert calls == ["a", "b"]
    cache.clear()
    cache.compute_once("a", lambda: calls.append("a"))
    assert calls == ["a", "b", "a"]


@given(one=ARGUMENTS, other=ARGUMENTS)
def test_arguments_that_differ_in_value_or_class_are_told_apart(one, other):
    same = repr(one) == repr(other)
    assert (describe_arguments(one, {}, True) == describe_arguments(other, {}, True)) is same


def test_the_numbers_of_an_index_are_not_described():
    index, x = torch.tensor([1, 0]), torch.randn(2, 3)
    with pytest.raises(TypeError, match="index"):
        describe_arguments((x, (slice(None), [index])), {}, True)
    assert describe_arguments((x, index), {}, False) == describe_arguments((x + 1, index + 1), {}, False)


def test_tensors_with_positions_are_described_by_these():
    x, y = torch.randn(2, 2, 3)
    ours, theirs = torch.zeros(2, 1), torch.ones(2, 1)
    own = describe_arguments(x, {id(x): (x, ours)}, True)
    assert own == describe_arguments(y, {id(y): (y, ours)}, True)
    assert own != describe_arguments(x, {id(x): (x, theirs)}, True)
    assert own != describe_arguments(x, {}, True)
