import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dense import both, close
from regard import AttentionMap, Causal, Padding, ShapeError
from regard.observe.value_norms import compute_value_norms, weight_by_norm
from strategies import requests

ASKED = requests().filter(lambda asked: asked.k.shape[2] > 0)
B, H, G, T, D, E, C = 2, 6, 3, 11, 5, 7, 13


def lengths(v, heads, projection):
    """The norm of every value as each head hands it over, (b, h, k), one by one."""
    b, g, k, _ = v.shape
    found = torch.zeros(b, heads, k, dtype=torch.float64)
    for n in range(b):
        for h in range(heads):
            for j in range(k):
                handed = v[n, h // (heads // g), j]
                found[n, h, j] = (handed if projection is None else handed @ projection[h]).norm()
    return found


@settings(max_examples=60)
@given(ASKED, st.booleans())
def test_shares_are_of_the_weights_times_the_norms_of_what_is_handed_over(asked, projected):
    m, dense = both(asked)
    h = dense.shape[1]
    projection = torch.randn(h, asked.v.shape[3], 3, dtype=torch.float64) if projected else None
    weighted = dense.weights * lengths(asked.v, h, projection).unsqueeze(2)
    found = weight_by_norm(m, asked.v, projection)

    def share(n, one, i, keys):
        return weighted[n, one, i, keys].sum() / weighted[n, one, i].sum()

    close(found.total, weighted.sum(-1))
    close(found.weight_on_first(), dense.mean(lambda n, one, i: share(n, one, i, [dense.find_first_visible_key(n)])))


def test_values_of_norm_0_hand_nothing_over():
    m = AttentionMap(torch.randn(B, H, T, D), torch.randn(B, G, T, D))
    assert weight_by_norm(m, torch.zeros(B, G, T, E)).weight_on_first().isnan().all()


@pytest.mark.parametrize("values", [(B, 4, T, E), (B, G, T + 1, E), (1, G, T, E), (G, T, E)])
def test_values_that_do_not_fit_are_reported(values):
    with pytest.raises(ShapeError, match="values must be"):
        compute_value_norms(torch.randn(values), (B, H, T, T))


def test_a_projection_has_its_rows_by_head():
    with pytest.raises(ShapeError, match="projection must be"):
        compute_value_norms(torch.randn(B, G, T, E), (B, H, T, T), torch.randn(H * E, C))


def test_the_first_value_is_measured_by_the_median_of_the_others():
    m = AttentionMap(torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 3), Causal() & Padding([4, 6]))
    values = torch.randn(2, 1, 6, 5).double()
    values[:, :, 0] *= 0.01
    found = weight_by_norm(m, values).first_value_ratio()
    norms = values.norm(dim=-1)[:, 0]
    for row, length in enumerate((4, 6)):
        others = sorted(norms[row, 1:length].tolist())
        expected = float(norms[row, 0]) / others[(len(others) - 1) // 2]
        torch.testing.assert_close(found[row], torch.full((2,), expected, dtype=torch.float64), rtol=1e-5, atol=0)
