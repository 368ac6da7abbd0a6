import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError
from regard.models import GPT2, GPT2Config

SMALL = GPT2Config(layers=2, heads=3, width=15, context=17, vocabulary=53)


@given(
    layers=st.integers(1, 5),
    heads=st.integers(1, 5),
    inner=st.sampled_from([0, 1, 31]),
    context=st.integers(1, 40),
    vocabulary=st.integers(1, 90),
    tied=st.booleans(),
)
def test_the_parts_are_the_parameters_of_the_model(layers, heads, inner, context, vocabulary, tied):
    config = GPT2Config(layers, heads, 7 * heads, context, vocabulary, inner=inner, tied=tied)
    with torch.device("meta"):
        model = GPT2(config)
    counts = dict.fromkeys(config.parts, 0)
    for name, weight in model.named_parameters():
        kinds = {"tokens": "token embedding", "positions": "position embedding", "head": "head"}
        part = kinds.get(name.split(".")[0]) or (
            "norms" if "norm" in name else "attention" if "attention" in name else "feed-forward"
        )
        counts[part] += weight.numel()
    assert counts == config.parts
    assert config.parameters == sum(p.numel() for p in model.parameters())


def test_multiply_adds_are_those_of_the_matrix_products():
    t, c = 11, SMALL.width
    block = 4 * c * c + 2 * c * SMALL.inner
    pairs = t * (t + 1) // 2  # of a query and a key it may see; scores and contexts take a multiply-add for each number
    expected = SMALL.layers * (block * t + 2 * c * pairs) + SMALL.vocabulary * c * t
    assert sum(SMALL.multiply_adds(t).values()) == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 0}, "layers must be"),
        ({"heads": 2}, "width must be a multiple of heads, got width=15, heads=2"),
        ({"vocabulary": 5.0}, "vocabulary must be a whole number"),
        ({"context": True}, "context must be a whole number"),
        ({"inner": -1}, "inner must be"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"epsilon": 0.0}, "epsilon must be a number above 0"),
        ({"epsilon": "1e-5"}, "epsilon must be a number above 0"),
        ({"epsilon": [1e-5]}, "epsilon must be a number above 0"),
        ({"activation": []}, "activation must be one of"),
        ({"inner": True}, "inner must be"),
        ({"tied": "no"}, "tied must be"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        dataclasses.replace(SMALL, **change)
