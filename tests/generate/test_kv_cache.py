import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generate.small_models import SIZES, gpt2, rows
from regard import ConfigError, ShapeError
from regard.generate import Cache
from run_limits import limit_examples

MODEL = gpt2()
LAYERS, CONTEXT = SIZES["layers"], SIZES["context"]


def assert_equal(a, b):
    torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@settings(max_examples=limit_examples(20))
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6).filter(lambda cuts: sum(cuts) <= CONTEXT), st.integers(1, 3))
def test_a_text_read_in_pieces_has_the_logits_of_the_whole(cuts, b):
    tokens = torch.tensor(rows(*[sum(cuts)] * b))
    cache = Cache(LAYERS, sum(cuts))
    with torch.no_grad():
        read = torch.cat([MODEL(part, cache) for part in tokens.split(cuts, 1)], 1)
        assert_equal(read, MODEL(tokens))


@settings(max_examples=limit_examples(20))
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torch.float32, torch.bfloat16, None]),
    st.booleans(),
)
def test_keys_are_the_same_to_the_first_queries_and_to_later_ones(cuts, dtype, stored, is_ragged):
    """As they are stored, in the wider dtype of the two: the first queries see them rounded, too."""
    cache = Cache(1, sum(cuts) + 1)
    cache.lengths = torch.tensor([0, 1]) if is_ragged else 0
    whole, kind = torch.randn(2, 3, sum(cuts), 5, dtype=torch.float64).to(dtype), stored or dtype
    expected, start = whole.to(kind).to(torch.promote_types(kind, dtype)), 0
    for part in whole.split(cuts, 2):
        t = part.shape[2]
        cache.advance(t)
        keys, values, first = cache.layer(0, *[stored] * (stored is not None))(part, -part)
        for row in range(2):
            place = row if is_ragged else 0
            assert int(torch.as_tensor(first).expand(2)[row]) == place + start
            assert torch.equal(keys[row, :, place : place + start + t], expected[row, :, : start + t])
            assert torch.equal(values[row, :, place : place + start + t], -expected[row, :, : start + t])
        start += t
    assert cache.dtype == kind
    assert keys.dtype == expected.dtype or (keys.dtype == dtype and len(cuts) == 1)


@settings(max_examples=limit_examples(20))
@given(st.lists(st.integers(1, 11), min_size=2, max_size=5), st.integers(1, 5))
def test_rows_of_unequal_length_go_on_as_each_would_alone(lengths, more):
    prompts, after = rows(*lengths), rows(*[more] * len(lengths), seed=1)
    cache = Cache(LAYERS, max(lengths) + more)
    padded = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in prompts])
    with torch.no_grad():
        MODEL(padded, cache)
        cache.crop(torch.tensor(lengths))
        stepped = torch.cat([MODEL(torch.tensor(after)[:, n : n + 1], cache) for n in range(more)], 1)
        for row, (prompt, rest) in enumerate(zip(prompts, after, strict=True)):
            assert_equal(stepped[row], MODEL(torch.tensor([prompt + rest]))[0, len(prompt) :])


def test_keys_are_written_in_place_into_what_was_allocated_once():
    cache = Cache(LAYERS, 13)
    tokens = torch.tensor(rows(13, 13))
    with torch.no_grad():
        MODEL(tokens[:, :5], cache)
        addresses = [x.data_ptr() for x in (*cache._keys, *cache._values)]
        MODEL(tokens[:, 5:], cache)
    assert [x.data_ptr() for x in (*cache._keys, *cache._values)] == addresses
    assert {tuple(x.shape) for x in (*cache._keys, *cache._values)} == {(2, 3, 13, 11)}


def test_what_was_cropped_away_leaves_no_trace():
    first, wrong, right = (torch.tensor(one) for one in (rows(5), rows(7, seed=1), rows(3, seed=2)))
    cache = Cache(LAYERS, 12)
    with torch.no_grad():
        MODEL(first, cache)
        MODEL(wrong, cache)
        cache.crop(5)
        assert_equal(MODEL(right, cache), MODEL(torch.cat([first, right], 1))[:, 5:])


def test_a_fork_goes_on_from_one_row_and_leaves_it_as_it_was():
    prefix, after = torch.tensor(rows(5)), torch.tensor(rows(3, 3, 3, seed=1))
    cache = Cache(LAYERS, 5)
    with torch.no_grad():
        MODEL(prefix, cache)
        for _ in range(2):  # the second fork would see what the first has written
            read = MODEL(after, cache.fork(3, 8))
            assert_equal(read, MODEL(torch.cat([prefix.expand(3, -1), after], 1))[:, 5:])
    assert cache.lengths == 5


def test_reordered_rows_go_on_as_those_they_are():
    prompts, after = rows(3, 7, 5), torch.tensor(rows(2, 2, 2, seed=1))
    cache = Cache(LAYERS, 9)
    order = [2, 2, 0]
    with torch.no_grad():
        MODEL(torch.tensor([[*row, *[0] * (7 - len(row))] for row in prompts]), cache)
        cache.crop(torch.tensor([3, 7, 5]))
        cache.reorder(torch.tensor(order))
        read = MODEL(after, cache)
        for row, old in enumerate(order):
            whole = torch.tensor([prompts[old] + after[row].tolist()])
            assert_equal(read[row], MODEL(whole)[0, len(prompts[old]) :])


def test_only_the_logits_that_are_wanted_are_computed():
    tokens = torch.tensor(rows(7, 7))
    with torch.no_grad():
        whole = MODEL(tokens)
        for wanted, expected in (
            (3, whole[:, -3:]),
            (torch.tensor([2, 6]), torch.stack([whole[0, 2:3], whole[1, 6:7]])),
            (None, whole),
        ):
            cache = Cache(LAYERS, 7)
            cache.wanted = wanted
            assert_equal(MODEL(tokens, cache), expected)


def test_what_a_cache_cannot_hold_is_an_error():
    cache = Cache(LAYERS, 7)
    MODEL(torch.tensor(rows(5)), cache)
    with pytest.raises(ConfigError, match="room for 7 tokens: it holds 5, and 3 more"):
        MODEL(torch.tensor(rows(3)), cache)
    with pytest.raises(ShapeError, match=r"\(b, h\) = \(1, 3\), got \(2, 3\)"):
        MODEL(torch.tensor(rows(2, 2)), cache)
    with pytest.raises(ConfigError, match="cannot be cropped to 8"):
        cache.crop(8)
    with pytest.raises(ConfigError, match="room for 3"):
        Cache.fork(cache, 2, 3)
    with pytest.raises(ConfigError, match="room=0"):
        Cache(2, 0)
