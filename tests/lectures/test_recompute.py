import pytest
import torch

from regard.lectures import printed_numbers
from regard.lectures.comparison import INPUTS
from regard.lectures.recompute import RECOMPUTED

PROSE = {"id", "source", "mechanism", "note", "input", "tokens", "from_example", "equals"}  # words, and names of others


def fields(entry, path=""):
    """The fields that hold something other than prose: dictionaries, and lists of them, by their own fields."""
    if isinstance(entry, list) and entry and isinstance(entry[0], dict):
        return {field for part in entry for field in fields(part, path)}
    if isinstance(entry, dict):
        inner = ((name, value) for name, value in entry.items() if path or name not in PROSE)
        return {field for name, value in inner for field in fields(value, f"{path}.{name}" if path else name)}
    return {path}


def list_compared_fields(example):
    torch.manual_seed(2)
    return {comparison.field for claim in RECOMPUTED[example["id"]](example) for comparison in claim.comparisons}


EXAMPLES = [pytest.param(example, id=example["id"]) for example in printed_numbers.load_printed_numbers()["examples"]]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_field_is_compared_or_named_as_an_input_with_its_reason(example):
    assert fields(example) - list_compared_fields(example) <= INPUTS.keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_field_is_both_compared_and_an_input(example):
    assert not list_compared_fields(example) & INPUTS.keys()


def test_every_input_has_a_reason_and_is_a_field_of_some_example():
    found = {field for example in printed_numbers.load_printed_numbers()["examples"] for field in fields(example)}
    assert INPUTS.keys() <= found
    assert all(INPUTS.values())


def test_every_example_is_computed_and_nothing_else_is():
    assert [example["id"] for example in printed_numbers.load_printed_numbers()["examples"]] == list(RECOMPUTED)


def test_an_unlisted_field_would_be_noticed():
    example = {
        **printed_numbers.get_printed_example("softmax-211"),
        "logarithms": [2.0, 1.0, 0.1],
        "inner": [{"entropy": 0.84}],
    }
    assert fields(example) - list_compared_fields(example) - INPUTS.keys() == {"logarithms", "inner.entropy"}


def test_what_an_example_goes_on_from_is_what_that_example_computes():
    (renormalised,) = RECOMPUTED["causal-renormalised"](printed_numbers.get_printed_example("causal-renormalised"))
    (hidden,) = RECOMPUTED["causal-minus-infinity"](printed_numbers.get_printed_example("causal-minus-infinity"))
    first, second = ({c.field: c.computed for c in claim.comparisons}["weights"] for claim in (renormalised, hidden))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)
