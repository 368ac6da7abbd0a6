"""Whose step a call is: told by the keys, to the bit."""

import pytest
import torch

from regard.observe.stored_calls.decoder_steps import match_keys
from regard.observe.stored_calls.parent_rows import has_equal_rows

B, S, N = 3, 5, 7
KEYS = torch.randn(B, 1, S, N, generator=torch.Generator().manual_seed(0))


def test_the_same_keys_are_the_same_rows():
    assert match_keys(KEYS, KEYS.clone(), None).parents is None


def test_rows_that_have_moved_or_multiplied_are_found_by_their_keys():
    for rows in ([2, 0, 1], [1, 1, 1, 0], [2]):
        assert match_keys(KEYS, KEYS[rows], None).parents.tolist() == rows


def test_of_rows_with_the_same_keys_the_stated_ones_are_used():
    twins = KEYS[[0, 0, 1]]
    for rows in ([1, 0, 2], [0, 1, 2], [1, 1, 2]):
        assert match_keys(twins, twins[rows], torch.tensor(rows)).parents.tolist() == rows


def test_stated_rows_that_cannot_be_are_ignored():
    for told in ([2, 0, 0], [0, 1], [7, 0, 1]):
        assert match_keys(KEYS, KEYS[[2, 0, 1]], torch.tensor(told)).parents.tolist() == [2, 0, 1]


def test_keys_that_differ_by_a_bit_are_of_another_sentence():
    other = KEYS.clone()
    other[1, 0, 3, 2] = torch.nextafter(other[1, 0, 3, 2], torch.tensor(9.0))
    assert match_keys(KEYS, other, None) is None
    assert match_keys(KEYS, KEYS[:, :, 1:], None) is None
    assert match_keys(KEYS, KEYS.double(), None) is None


def test_rows_with_the_same_keys_are_noticed():
    assert has_equal_rows(KEYS[[0, 1, 0]])
    assert not has_equal_rows(KEYS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_with_the_same_keys_are_noticed_where_their_products_were_rounded_in_two_ways(dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(S, 301), torch.randn(301, N)
    once = x.to(dtype) @ weight.to(dtype)
    parts = [a.to(dtype) @ b.to(dtype) for a, b in zip(x.split(7, 1), weight.split(7), strict=True)]
    again = sum(parts[1:], parts[0])
    assert not torch.equal(once, again)
    assert has_equal_rows(torch.stack([once, KEYS[0, 0].to(dtype), again]).unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_sentences_of_which_one_word_is_another_are_not_the_same(dtype):
    keys = KEYS[[0, 0]].to(dtype)
    keys[1, :, S - 1] = KEYS[1, :, 0].to(dtype)
    assert not has_equal_rows(keys)
