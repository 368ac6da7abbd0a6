from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from generate.small_models import table
from regard import ConfigError, DataError
from regard.generate import Settings, generate
from regard.generate.sampling import RowGenerators, Sampling, draw_tokens

B, N = 3, 17


def logits(seed=0):
    return torch.randn(B, N, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3


@st.composite
def samplings(draw):
    return {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.7, 1.3, 5.0])),
        "temperature": draw(st.sampled_from([1.0, 0.1, 0.8, 2.5])),
        "top_k": draw(st.sampled_from([0, 1, 3, N, 99])),
        "top_p": draw(st.sampled_from([1.0, 0.0, 0.3, 0.9])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    }


@given(samplings(), st.integers(0, 999), st.integers(1, 9))
def test_every_setting_and_their_order_is_that_of_transformers(asked, seed, length):
    """Of transformers a batch has one length; none of ours asks for more than a row's own history."""
    scores = logits(seed)
    history = torch.randint(0, N, (B, length), generator=torch.Generator().manual_seed(seed))
    expected = theirs.RepetitionPenaltyLogitsProcessor(asked["repetition_penalty"])(history, scores.clone())
    expected = theirs.TemperatureLogitsWarper(asked["temperature"])(history, expected)
    if asked["top_k"]:
        expected = theirs.TopKLogitsWarper(asked["top_k"])(history, expected)
    if asked["top_p"] < 1:
        expected = theirs.TopPLogitsWarper(asked["top_p"])(history, expected)
    if asked["min_p"]:
        expected = theirs.MinPLogitsWarper(asked["min_p"])(history, expected)
    found = Sampling(**asked).compute_scores(scores, history.tolist())
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [2**-21, 1e-30, 1e-40, 5e-324])
@pytest.mark.parametrize("asked", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1e-20}])
def test_a_temperature_just_above_zero_is_nearly_certain_of_the_likeliest(temperature, asked, dtype):
    scores, history = logits().to(dtype), [[1], [5], []]
    expected = Sampling(temperature=0, **asked).compute_probabilities(scores, history)
    found = Sampling(temperature=temperature, **asked).compute_probabilities(scores, history)
    torch.testing.assert_close(found, expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_token_of_no_probability_is_never_drawn(weights, u):
    token = int(draw_tokens(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)))
    assert weights[token] > 0


def test_a_draw_is_the_token_at_which_the_sum_passes_it():
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(5, -1)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert draw_tokens(p, u).tolist() == [0, 0, 2, 2, 3]
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(torch.tensor([[0.1, 0.2, 0.0]]), last).tolist() == [1]


def test_draws_have_the_distribution():
    """Chi-square of 20,000 draws; a right implementation fails one seed in 10,000, and the seed is fixed."""
    p = logits().softmax(-1)[:1]
    dice, count = RowGenerators(0, 1), 20_000
    found = draw_tokens(p.expand(count, -1), torch.cat([dice.draw_uniform() for _ in range(count)]))
    expected = p[0] * count
    large = expected >= 5
    observed = torch.bincount(found, minlength=N).double()
    observed, expected = (torch.cat([x[large], x[~large].sum()[None]]) for x in (observed, expected))
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2.0).double(), statistic / 2) > 1e-4


def test_the_dice_of_a_row_do_not_depend_on_the_rows_beside_it():
    three, one = RowGenerators([5, 7, 11], 3), RowGenerators([7], 1)
    for _ in range(3):
        assert three.draw_uniform()[1] == one.draw_uniform()[0]
    assert torch.equal(RowGenerators(5, 2).draw_uniform(), RowGenerators(5, 7).draw_uniform()[:2])


def test_a_seed_draws_the_same_again_and_none_does_not():
    assert torch.equal(RowGenerators(3, 2).draw_uniform(), RowGenerators(3, 2).draw_uniform())
    assert not torch.equal(RowGenerators(None, 2).draw_uniform(), RowGenerators(None, 2).draw_uniform())
    assert torch.equal(RowGenerators(-1, 1).draw_uniform(), RowGenerators(-1, 1).draw_uniform())


@pytest.mark.parametrize("asked", [{}, {"temperature": 0}, {"top_p": 0.5, "top_k": 3}])
def test_logits_that_are_no_numbers_are_reported(asked):
    broken = logits()
    broken[1, 5] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        Sampling(**asked).choose(broken, [[]] * B, RowGenerators(0, B))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": -1}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k is a number of tokens"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_k": "all"}, "top_k must be a whole number, or None for all"),
        ({"top_p": 1.5}, "top_p is a probability"),
        ({"min_p": -0.1}, "min_p is a probability"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-40}, r"repetition_penalty must be above 0, from 1e-20 to 1e\+20, .*; got 1e-40"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ],
)
def test_a_setting_outside_what_is_possible_is_refused(asked, says):
    with pytest.raises(ConfigError, match=says):
        Sampling(**asked)


@pytest.mark.parametrize("option", [field.name for field in fields(Sampling)])
def test_none_in_place_of_an_option_is_no_cut(option):
    others = {"temperature": 0.5, "top_p": 0.8, "min_p": 0.1} if option == "top_k" else {"top_k": 3}
    assert Sampling(**{option: None}, **others) == Sampling(**others)
    assert not Settings(**{option: None}).has_sampling_options
    assert Settings(**{option: None}, beams=2).beams == 2
    assert list(generate(table(N), [1, 2], 3, seed=0, **{option: None})) == list(generate(table(N), [1, 2], 3, seed=0))


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30, [0, 1, 2**64]])
def test_a_seed_that_torch_does_not_take_is_refused(seed):
    with pytest.raises(ConfigError, match=r"a seed must be at least -2\*\*63 and below 2\*\*64"):
        RowGenerators(seed, 3)
