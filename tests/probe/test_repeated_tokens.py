import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config as TransformersConfig
from transformers import GPT2LMHeadModel

from regard import ConfigError
from regard.models import GPT2, GPT2Config
from regard.probe.repeated_tokens import make_probe, make_probe_of_model


@given(
    vocabulary=st.integers(8, 300),
    begin=st.none() | st.integers(0, 7),
    special=st.lists(st.integers(0, 5), max_size=3),
    context=st.none() | st.integers(9, 60),
    seeds=st.integers(2, 4),
    length=st.integers(2, 40),
    repeats=st.integers(2, 4),
)
def test_each_row_is_the_begin_token_and_copies_of_the_same_random_tokens(
    vocabulary, begin, special, context, seeds, length, repeats
):
    settings = {"begin": begin, "special": tuple(special), "context": context, "seeds": seeds, "length": length}
    probe = make_probe(vocabulary, **settings, repeats=repeats)
    assert len(probe.tokens) == seeds
    assert context is None or probe.tokens.shape[1] <= context
    assert 2 <= probe.length <= length
    for row in probe.tokens.tolist():
        body = row if begin is None else row[1:]
        assert begin is None or row[0] == begin
        first = body[: probe.length]
        assert body == first * repeats
        assert len(set(first)) == len(first)
        assert not {*special, begin} & set(first)
        assert all(0 <= token < vocabulary for token in first)
        copied = row[probe.repeated.start + 1 : probe.repeated.stop + 1]  # what the repeated positions predict
        assert copied == (first * (repeats - 1))[1:]
        assert row[probe.later_copies] == first * (repeats - 1)
    assert torch.equal(probe.tokens, make_probe(vocabulary, **settings, repeats=repeats).tokens)


def test_seeds_are_different_and_more_of_them_leave_the_first_as_they_are():
    few, many = make_probe(1000, seeds=3), make_probe(1000, seeds=7)
    assert torch.equal(many.tokens[:3], few.tokens)
    assert len({tuple(row) for row in many.tokens.tolist()}) == 7


@pytest.mark.parametrize(
    ("vocabulary", "settings"), [(3, {"special": (0, 1)}), (100, {"context": 3}), (100, {"context": 4, "begin": 0})]
)
def test_a_probe_that_cannot_repeat_two_tokens_is_refused(vocabulary, settings):
    with pytest.raises(ConfigError, match="at least 2 different tokens"):
        make_probe(vocabulary, **settings)


@pytest.mark.parametrize("settings", [{"seeds": 1}, {"repeats": 1}, {"length": 0}, {"seeds": 2.5}])
def test_sizes_that_make_no_probe_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make_probe(100, **settings)


def test_begin_and_context_are_read_from_the_config():
    config = TransformersConfig(
        vocab_size=50, n_positions=20, n_layer=1, n_head=1, n_embd=4, bos_token_id=7, eos_token_id=[8, 9]
    )
    probe = make_probe_of_model(GPT2LMHeadModel(config), 50)
    assert probe.tokens.shape == (8, 19)
    assert set(probe.tokens[:, 0].tolist()) == {7}
    assert not {8, 9} & set(probe.tokens.flatten().tolist())
    own = make_probe_of_model(GPT2(GPT2Config(1, 1, 4, 30, 50)), 50, begin=3, length=5)
    assert own.tokens.shape == (8, 11)
    pocket = GPT2.load("pocket")
    assert set(make_probe_of_model(pocket, 2048).tokens[:, 0].tolist()) == {pocket.get_end_settings()["end"]}
