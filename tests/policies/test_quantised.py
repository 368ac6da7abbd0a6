"""Quantised rounds each group to levels between its smallest and its largest number."""

import pytest
import torch

from policies.reference import B, D, E, G, P, make_inputs
from regard import ConfigError
from regard.policies import Quantised


def round_plainly(numbers, bits):
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1)
    return [low + round((x - low) / step) * step if step else x for x in numbers]


@pytest.mark.parametrize(("bits", "group"), [(1, 4), (3, 4), (8, 5)])
def test_keys_are_rounded_by_feature_and_values_by_token(bits, group):
    inputs = make_inputs()
    k, v = Quantised(bits, group).change_cache(inputs)
    end = P // group * group
    for b in range(B):
        for g in range(G):
            for start in range(0, end, group):
                for c in range(D):
                    expected = round_plainly(inputs.k[b, g, start : start + group, c].tolist(), bits)
                    torch.testing.assert_close(k[b, g, start : start + group, c], torch.tensor(expected, dtype=k.dtype))
            for j in range(end):
                for start in range(0, E, group):
                    expected = round_plainly(inputs.v[b, g, j, start : start + group].tolist(), bits)
                    torch.testing.assert_close(v[b, g, j, start : start + group], torch.tensor(expected, dtype=v.dtype))
    assert torch.equal(k[:, :, end:], inputs.k[:, :, end:])
    assert torch.equal(v[:, :, end:], inputs.v[:, :, end:])


@pytest.mark.parametrize("settings", [{"bits": 0}, {"bits": 17}, {"group": 0}])
def test_bad_settings_are_refused_in_a_sentence(settings):
    with pytest.raises(ConfigError, match="Quantised"):
        Quantised(**settings)
