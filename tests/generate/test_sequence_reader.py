from types import SimpleNamespace

import numpy as np
import pytest
import torch

from generate.small_models import SIZES, gpt2, rows, stack_tokens
from regard import DataError, ShapeError
from regard.generate import PrefixCache
from regard.generate.sequence_reader import SequenceReader, compute_logits, list_token_rows

MODEL = gpt2()
CONTEXT, N = SIZES["context"], SIZES["vocabulary"]


def read_last_logits(row):
    """What the model says after the last tokens of a row that its context holds, all read afresh."""
    with torch.no_grad():
        return MODEL(torch.tensor([row[-CONTEXT:]]))[0, -1]


def test_what_was_read_in_several_turns_is_as_if_read_at_once():
    reader = SequenceReader(MODEL, 20, count=3)
    turns = [rows(3, 7, 5), rows(1, 1, 1, seed=1), rows(1, 1, 1, seed=2)]
    for turn in turns:
        found = reader.read(turn)
    for n in range(3):
        whole = [token for turn in turns for token in turn[n]]
        torch.testing.assert_close(found[n], read_last_logits(whole), atol=1e-11, rtol=0)


def test_beyond_the_context_the_last_tokens_of_each_row_are_read_afresh():
    reader = SequenceReader(MODEL, 1000, count=3)
    whole = rows(CONTEXT - 2, 5, CONTEXT)
    reader.read(whole)
    for turn in (rows(1, 1, 1, seed=n) for n in range(1, 5)):
        found = reader.read(turn)
        whole = [row + more for row, more in zip(whole, turn, strict=True)]
        expected = torch.stack([read_last_logits(row) for row in whole])
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_a_prefix_is_read_once_and_every_row_goes_on_from_it():
    (prefix,), after = rows(7), [[], *rows(3, 1, seed=1)]
    known = PrefixCache.read(MODEL, prefix)
    found = stack_tokens(MODEL.generate(after, 5, temperature=0, after=known))
    assert torch.equal(found, stack_tokens(MODEL.generate([prefix + row for row in after], 5, temperature=0)))
    assert torch.equal(found, stack_tokens(MODEL.generate(after, 5, temperature=0, after=known)))  # it is as it was


@pytest.mark.parametrize("size", [1, CONTEXT])
def test_a_prefix_of_one_token_or_of_the_whole_context_serves_too(size):
    (prefix,) = rows(size)
    asked = {"temperature": 0, "past": "slide"}
    found = stack_tokens(MODEL.generate([[], [5]], 3, after=PrefixCache.read(MODEL, prefix), **asked))
    assert torch.equal(found, stack_tokens(MODEL.generate([prefix, [*prefix, 5]], 3, **asked)))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_a_prefix_of_a_model_with_other_layers_is_refused(size, layers):
    known = PrefixCache.read(gpt2(layers=layers), [1] * size)
    with pytest.raises(ShapeError, match=rf"layers={layers}, this model has layers=2\. Read it with this model"):
        MODEL.generate([3], 2, after=known)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([torch.tensor([1]), (2, 3)], [[1], [2, 3]]),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]]),
        ([np.int64(1), torch.tensor(2), 3], [[1, 2, 3]]),
        ([[torch.tensor(1)], [2, np.uint8(3)]], [[1], [2, 3]]),
    ],
)
def test_tokens_come_in_many_forms(tokens, found):
    assert list_token_rows(tokens, N) == found


@pytest.mark.parametrize(
    ("tokens", "error", "says"),
    [
        ([], ShapeError, "no tokens"),
        ([[1], []], ShapeError, "no tokens"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), ShapeError, r"\(1, 2, 3\)"),
        (torch.zeros(2), ShapeError, "float32"),
        ([1, N], DataError, f"{N} is not a token of this model: they are numbered from 0 to {N - 1}"),
        ([-1], DataError, "-1 is not a token"),
        (["a"], DataError, "'a' is not a token"),
        ([[1], 2], DataError, "is not a token"),
        ([torch.tensor(1.0)], DataError, r"a tensor of torch.float32 \(\) is not a token"),
        ([1, True], DataError, "True is not a token"),
    ],
)
def test_tokens_that_are_none_are_reported(tokens, error, says):
    with pytest.raises(error, match=says):
        list_token_rows(tokens, N)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: SimpleNamespace(logits=x), lambda x: (x, None)])
def test_logits_are_found_as_a_tensor_as_an_attribute_and_first_in_a_tuple(wrap):
    logits = torch.randn(2, 3, 5, requires_grad=True)
    assert compute_logits(lambda tokens: wrap(logits), torch.zeros(2, 3)) is logits


@pytest.mark.parametrize("output", [(), None, torch.zeros(2, 3), torch.zeros(2, 4, 5), SimpleNamespace(logits=[1])])
def test_what_are_no_logits_is_refused(output):
    with pytest.raises(ShapeError, match=r"of tokens \(2, 3\) a model must give logits \(b, t, n\)"):
        compute_logits(lambda tokens: output, torch.zeros(2, 3))
