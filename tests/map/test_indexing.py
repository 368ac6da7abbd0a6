"""m[...] as a Python programmer expects it: places from the end, iteration, and the errors of lists and dictionaries."""

import numpy as np
import pytest
import torch

from regard import AttentionMap, Causal, ConfigError, ShapeError, attend

B, H, G, Q, K, D = 2, 6, 3, 5, 7, 4
SHAPE = (B, H, Q, K)


def both():
    torch.manual_seed(0)
    q, k = torch.randn(B, H, Q, D, dtype=torch.float64), torch.randn(B, G, K, D, dtype=torch.float64)
    return AttentionMap(q, k, Causal()), attend(q, k, k, Causal()).weights


@pytest.mark.parametrize("axis", range(4))
def test_a_place_that_an_axis_lacks_is_an_index_error(axis):
    m, _ = both()
    for place in (SHAPE[axis], -SHAPE[axis] - 1, [0, SHAPE[axis]], torch.tensor([SHAPE[axis]]), 10**30):
        with pytest.raises(IndexError, match=r"out of range: .*the axis has 0 to") as caught:
            m[(slice(None),) * axis + (place,)]
        assert isinstance(caught.value, ShapeError)


@pytest.mark.parametrize("axis", range(4))
def test_places_count_from_the_end_as_those_of_a_list(axis):
    m, weights = both()
    for place in range(-SHAPE[axis], SHAPE[axis]):
        index = (slice(None),) * axis + (place,)
        torch.testing.assert_close(m[index], weights[index], rtol=0, atol=1e-12)
    found = m[(slice(None),) * axis + (np.array([0, -1]),)]
    torch.testing.assert_close(found, weights[(slice(None),) * axis + (torch.tensor([0, -1]),)], rtol=0, atol=1e-12)


def test_a_map_is_iterated_as_the_tensor_is():
    m, weights = both()
    assert len(m) == len(weights)
    for mine, theirs in zip(m, weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    for mine, theirs in zip(reversed(m), weights.flip(0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert m.select(batch=[])  # a map is no container that is empty


def test_a_selection_takes_what_an_index_takes():
    m, weights = both()
    bools = torch.tensor([True, False, True, False, False, True])
    for heads in (0, -1, [0, -1], slice(1, None, 2), torch.tensor([5, 0]), bools, bools.tolist(), np.int64(3), range(2, 4)):
        expected = weights[
            :, [heads] if isinstance(heads, int | np.integer) else torch.as_tensor(heads) if isinstance(heads, range) else heads
        ]
        torch.testing.assert_close(m.select(heads=heads).dense(), expected, rtol=0, atol=1e-12)
    with pytest.raises(IndexError, match="heads is out of range: got 6, but the axis has 0 to 5"):
        m.select(heads=H)
    with pytest.raises(IndexError, match="batch is out of range: got -3, but the axis has 0 to 1"):
        m.select(batch=-3)
    with pytest.raises(ConfigError, match=r"heads must be an int, a slice, .* got None"):
        m.select(heads=None)
