import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.mechanism import spans

KEYS = 24
sets = st.sets(st.integers(0, KEYS - 1))


def ranges(keys: set[int]) -> spans.Spans:
    return spans.find_true_spans(torch.tensor([n in keys for n in range(KEYS)]))


def members(found: spans.Spans) -> set[int]:
    listed = [n for start, stop in found for n in range(start, stop)]
    assert len(listed) == len(set(listed)), "ranges overlap"
    assert listed == sorted(listed)
    return set(listed)


@given(sets)
def test_runs_hold_exactly_the_keys_that_are_true(keys):
    assert members(ranges(keys)) == keys


@given(sets, sets)
def test_ranges_are_joined_met_and_turned_round_as_sets_are(a, b):
    assert members(spans.union(ranges(a), ranges(b))) == a | b
    assert members(spans.intersection(ranges(a), ranges(b))) == a & b
    assert members(spans.complement(ranges(a), KEYS)) == set(range(KEYS)) - a
    assert spans.is_superset(ranges(a), ranges(b)) == (b <= a)


@given(sets, st.integers(0, 5), st.integers(1, 9))
def test_coarser_ranges_lose_no_key(keys, gap, block):
    assert members(spans.merge_spans(ranges(keys), gap)) >= keys
    found = spans.align_spans(ranges(keys), block, KEYS)
    assert members(found) == {n for n in range(KEYS) if any(n // block == key // block for key in keys)}
