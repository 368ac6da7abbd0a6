import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError, ShapeError
from regard.mechanism import heads

B, H, T, D = 2, 3, 5, 7


def test_split_gives_head_n_the_columns_n_d_to_n_plus_one_d():
    x = torch.randn(B, T, H * D)
    split = heads.split(x, H)
    assert split.shape == (B, H, T, D)
    for n in range(H):
        assert torch.equal(split[:, n], x[:, :, n * D : (n + 1) * D])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_join_undoes_split(h, d, t, b, batched):
    x = torch.randn(*((b, t, h * d) if batched else (t, h * d)))
    assert torch.equal(heads.join(heads.split(x, h)), x)


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_key_head_serves_neighbouring_query_heads(groups, share):
    k = torch.randn(B, groups, T, D)
    shared = heads.share(k, groups * share)
    for n in range(groups * share):
        assert torch.equal(shared[:, n], k[:, n // share])


def test_a_width_that_the_heads_cannot_share_names_one_that_works():
    with pytest.raises(ConfigError, match=r"width=100, heads=12. Nearest valid width: 96"):
        heads.split(torch.zeros(T, 100), 12)
    with pytest.raises(ConfigError, match="heads must be a whole number of at least 1, got 0"):
        heads.split(torch.zeros(T, 100), 0)


def test_key_heads_must_divide_query_heads():
    with pytest.raises(ShapeError, match="k has 2 heads, which does not divide the 3"):
        heads.share(torch.zeros(B, 2, T, D), 3)
