"""Checks of a caller's arguments, by the messages of the functions that use them."""

import numpy as np
import pytest

import regard

NAMES = {
    "an": ("AttentionMap", "ndarray", "LSTM", "RNN", "MHA", "NDFrame", "HTMLParser", "FNet", "XLNet", "SGD", "Unpickler"),
    "a": ("Recording", "list", "Linear", "Mamba", "RoPE", "SnapKV", "Namespace", "UserDict", "Union", "URL", "ufunc", "GRU"),
}


@pytest.mark.parametrize(("article", "name"), [(article, name) for article, names in NAMES.items() for name in names])
def test_a_message_has_the_article_with_which_a_class_is_spoken(article, name):
    with pytest.raises(regard.ConfigError, match=f"got {article} {name}\\."):
        regard.heads(type(name, (), {})())


def test_an_array_in_place_of_a_tensor_is_an_ndarray():
    with pytest.raises(regard.ConfigError, match="got an ndarray"):
        regard.attention(*3 * [np.zeros((1, 1, 2, 2))])
