import copy
import math

import numpy as np
import pytest
import torch

from regard import Causal, ConfigError
from regard.lectures import printed_numbers
from regard.lectures.comparison import Claim, FieldComparison, Verdict
from regard.lectures.verify import verify, verify_claim

ROWS = verify()
COMPARED = sorted(
    {
        (one.example, comparison.field)
        for one in ROWS
        if one.verdict != Verdict.MISPRINT
        for comparison in one.comparisons
        if one.example not in ("weight-transfer", "gpt2-sizes")  # which prints nothing; which prints words
    }
)


def list_examples_with(rows, verdict):
    return [one.example for one in rows if one.verdict == verdict]


@pytest.fixture
def figures(monkeypatch):
    """The file of figures, to be changed."""
    changed = copy.deepcopy(printed_numbers.load_printed_numbers())
    monkeypatch.setattr(printed_numbers, "load_printed_numbers", lambda: changed)
    return changed


def example_of(printed, name):
    return next(example for example in printed["examples"] if example["id"] == name)


def test_every_example_has_a_row_and_none_differs():
    assert {one.example for one in ROWS} == {example["id"] for example in printed_numbers.load_printed_numbers()["examples"]}
    assert list_examples_with(ROWS, Verdict.DIFFERS) == []
    assert all(one.difference <= one.tolerance for one in ROWS if one.verdict != Verdict.MISPRINT)


def test_the_leaky_mask_reproduces_and_its_row_says_that_it_is_wrong():
    leaky, right = verify("dog-leaky-mask")
    assert leaky.verdict == Verdict.WRONG
    assert leaky.difference <= leaky.tolerance
    assert "WRONG" in leaky.note
    assert "future" in leaky.note
    assert [comparison.field for comparison in right.comparisons] == ["correct_weights"]
    assert right.verdict == Verdict.AGREES
    assert not right.comparisons[0].computed.triu(1).any()
    assert {comparison.field: comparison.computed for comparison in leaky.comparisons}["weights"].triu(1).any()
    assert list_examples_with(ROWS, Verdict.WRONG) == ["dog-leaky-mask"]


def test_what_a_number_is_off_by_is_computed_in_float64_so_that_its_digits_are_the_same_everywhere():
    given, x = (
        printed_numbers.get_printed_example("dog-self-attention"),
        np.array(printed_numbers.load_printed_numbers()["inputs"]["dog"]["x"]),
    )
    q, k = (x @ np.array(given[name]) for name in ("W_query", "W_key"))
    off = np.abs(
        np.tril(q @ k.T / math.sqrt(3)) - np.array(printed_numbers.get_printed_example("dog-leaky-mask")["masked"])
    ).max()
    masked = next(one for one in verify("dog-leaky-mask")[0].comparisons if one.field == "masked")
    assert masked.difference == pytest.approx(off, abs=1e-12)


def test_what_does_not_follow_from_what_is_printed_is_a_misprint_and_is_explained():
    assert list_examples_with(ROWS, Verdict.MISPRINT) == ["multi-head-split", "gpt2-sizes"]
    assert all(one.note for one in ROWS if one.verdict != Verdict.AGREES)


def test_the_papers_sizes_are_off_and_the_corrected_one_is_not():
    corrected, paper, _ = verify("gpt2-sizes")
    assert corrected.verdict == Verdict.AGREES
    assert "124,439,808" in corrected.note
    assert paper.verdict == Verdict.MISPRINT
    assert "not reproducible" in paper.note
    assert paper.comparisons[0].printed.tolist() == [117, 345, 762, 1542]


@pytest.mark.parametrize(("name", "field"), COMPARED)
def test_a_number_printed_otherwise_differs_wherever_it_stands(figures, name, field):
    *path, last = field.split(".")
    holder = example_of(figures, name)
    for part in path:
        holder = holder[part]
    numbers = printed_numbers.parse_tensor(holder[last])
    for place in {(0,) * numbers.dim(), tuple(size - 1 for size in numbers.shape)}:
        wrong = numbers.clone()
        wrong[place] = 7 if wrong[place].isinf() else wrong[place] + 2 * max(one.tolerance for one in ROWS)
        holder[last] = wrong.tolist()
        assert name in list_examples_with(verify(name), Verdict.DIFFERS), (field, place)


@pytest.mark.parametrize(("before", "after"), [("117M", "118M"), ("124M", "125M")])
def test_another_size_in_the_table_differs(figures, before, after):
    smallest = example_of(figures, "gpt2-sizes")["table"][0]
    smallest["parameters"] = smallest["parameters"].replace(before, after)
    assert list_examples_with(verify(), Verdict.DIFFERS) == ["gpt2-sizes"]


@pytest.mark.parametrize(("field", "value"), [("layers", 13), ("d_model", 832)])
def test_another_model_in_the_table_differs(figures, field, value):
    example_of(figures, "gpt2-sizes")["table"][0][field] = value
    assert set(list_examples_with(verify(), Verdict.DIFFERS)) == {"gpt2-sizes"}


def test_another_input_differs_in_all_that_follows_from_it(figures):
    figures["inputs"]["dog"]["x"][4][2] += 0.1
    assert set(list_examples_with(verify(), Verdict.DIFFERS)) == {"dog-self-attention", "dog-leaky-mask"}


def test_another_seed_differs(figures):
    example_of(figures, "trainable-linear")["seed"] = 790
    assert list_examples_with(verify(), Verdict.DIFFERS) == ["trainable-linear"]


def test_the_reason_names_the_field_that_differs_and_by_how_much(figures):
    example_of(figures, "simple-all")["weights"][2][3] += 0.25
    (one,) = verify("simple-all")
    assert one.note == "differing: weights by 0.25"


def test_a_wrong_scale_is_found(monkeypatch):
    monkeypatch.setattr("regard.mechanism.request.default_scale", lambda q: 1 / q.shape[-1])
    found = list_examples_with(verify(), Verdict.DIFFERS)
    assert {"trainable-parameters", "trainable-linear", "causal-minus-infinity", "dog-self-attention"} <= set(found)
    assert "simple-all" not in found


def test_a_wrong_mask_is_found(monkeypatch):
    monkeypatch.setattr(Causal, "can_see", lambda self, b, h, i, j, offset=0: j >= i)
    found = set(list_examples_with(verify(), Verdict.DIFFERS))
    assert found == {"causal-renormalised", "causal-minus-infinity", "dropout-weights", "dog-leaky-mask", "multi-head-split"}


def test_a_softmax_over_the_wrong_axis_is_found(monkeypatch):
    monkeypatch.setattr("regard.mechanism.softmax.stable", lambda scores: scores.softmax(-2))
    found = set(list_examples_with(verify(), Verdict.DIFFERS))
    assert {"simple-one-query", "simple-all", "trainable-parameters", "dog-self-attention"} <= found


def test_a_fused_kernel_that_is_off_is_found(monkeypatch):
    monkeypatch.setattr("regard.layers.simple.attention", lambda q, k, v, **options: v)
    found = set(list_examples_with(verify(), Verdict.DIFFERS))
    assert {"simple-all", "trainable-linear", "multi-head-stacked"} <= found


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_number_that_is_none_differs_even_where_a_misprint_is_expected(broken):
    for known in Verdict:
        right = FieldComparison("weights", torch.ones(2), torch.ones(2))
        wrong = FieldComparison("scores", torch.ones(2), torch.tensor([1.0, broken]))
        one = verify_claim(printed_numbers.get_printed_example("simple-all"), Claim([right, wrong], "why", known))
        assert one.verdict == Verdict.DIFFERS
        assert one.note == f"differing: scores by {broken}"


def test_a_misprint_that_agrees_after_all_is_reported_as_agreeing():
    comparison = FieldComparison("scores", torch.ones(2), torch.ones(2))
    one = verify_claim(
        printed_numbers.get_printed_example("simple-all"), Claim([comparison], "why it is off", Verdict.MISPRINT)
    )
    assert (one.verdict, one.note) == (Verdict.AGREES, "")


def test_one_example_is_computed_as_it_is_among_all():
    one = verify("dropout-weights")
    assert [(row.example, row.difference) for row in one] == [
        (row.example, row.difference) for row in ROWS if row.example == "dropout-weights"
    ]


def test_the_random_state_and_the_gradient_mode_are_left_as_found():
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    verify()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_the_random_state_of_the_caller_changes_nothing():
    torch.manual_seed(13)
    assert [one.difference for one in verify()] == [one.difference for one in ROWS]


def test_the_default_dtype_of_the_caller_changes_nothing():
    torch.set_default_dtype(torch.float64)
    try:
        assert [one.difference for one in verify()] == [one.difference for one in ROWS]
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_unknown_example_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match=r"no example 'dog-leaky'\. Did you mean dog-leaky-mask\?.* gpt2-sizes"):
        verify("dog-leaky")
