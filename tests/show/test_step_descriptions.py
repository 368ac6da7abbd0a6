import math
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from regard import Causal, Steps, Window, attend
from regard.lectures.examples import EXAMPLES, build_example
from regard.show.arithmetic import write_arithmetic
from regard.show.number_format import RELATIVE_ERROR, format_number
from regard.show.step_descriptions import describe_example, get_formulas, list_active_steps, write_sentences

WORDS = ("a", "b", "c", "d")


def steps_of(mask=None, **options):
    torch.manual_seed(3)
    q, k, v = (torch.randn(len(WORDS), 3) for _ in "qkv")
    return attend(q, k, v, mask or Window(), **options)


def test_the_first_lecture_is_described_as_in_the_lectures():
    said = {scene.name: scene.sentence for scene in describe_example(build_example("simple"))}
    assert said["weights"] == "‘journey’ attends most to ‘journey’ (0.24), least to ‘one’ (0.11)."
    assert said["scores"] == "‘journey’ matches ‘journey’ best (1.50), ‘one’ least (0.71)."


def test_a_step_that_does_nothing_is_not_told():
    assert list_active_steps(steps_of(scale=1.0)) == ["scores", "weights", "context"]
    assert list_active_steps(steps_of(Causal())) == ["scores", "scaled", "masked", "weights", "context"]
    assert list_active_steps(steps_of(softcap=0.5, dropout=0.5)) == [
        "scores",
        "scaled",
        "capped",
        "weights",
        "dropped",
        "context",
    ]


def test_each_formula_follows_from_the_step_before_it():
    formulas = get_formulas(steps_of(Causal(), dropout=0.5), 3**-0.5, torch.ones(1, 3))
    assert formulas["scaled"] == "scores / √3"
    assert formulas["weights"] == "softmax(masked)"
    assert formulas["context"] == "dropped v"
    assert get_formulas(steps_of(scale=0.3), 0.3)["scaled"] == "scores · 0.3"


def test_a_word_that_occurs_twice_has_its_place_and_its_weight_in_one_bracket():
    steps = steps_of(Causal())
    best = int(steps.weights[2].argmax())
    sentence = write_sentences(steps, ["a", "a", "a", "d"], 2)["weights"]
    assert sentence.startswith(
        f"‘a’ (token 2) attends most to ‘a’ (token {best}, {float(steps.weights[2, best]):.2f}), least to"
    )


def test_blind_even_and_broken_rows_are_described_as_what_they_are():
    assert write_sentences(steps_of(~Window()), WORDS)["weights"] == "‘d’ may see nothing, so all its weights are 0."
    assert write_sentences(steps_of(~Window()), WORDS)["context"] == "‘d’ attends to nothing: its new vector is 0."
    even = attend(torch.zeros(4, 3), torch.ones(4, 3), torch.ones(4, 3))
    assert write_sentences(even, WORDS)["weights"] == "‘d’ attends equally to the 4 words it sees (0.25 each)."
    broken = attend(torch.full((4, 3), torch.nan), torch.ones(4, 3), torch.ones(4, 3))
    assert "NaN" in write_sentences(broken, WORDS)["weights"]


def test_every_head_has_its_part_of_the_sentence():
    said = write_sentences(build_example("heads").steps, build_example("heads").words)
    assert said["weights"].startswith("Head 1: ‘step’ attends most to")
    assert "; head 2: ‘step’ attends most to" in said["weights"]
    many = Steps(*(step.expand(6, *step.shape) for _, step in steps_of().items()))
    assert write_sentences(many, WORDS)["weights"].endswith("; and so on.")


def test_the_leak_shows_the_wrong_weights_and_the_right_ones():
    panels = {scene.name: scene.panels for scene in describe_example(build_example("leak"))}["weights"]
    assert [panel.title for panel in panels] == ["WRONG: tril alone", "right: -inf"]
    assert panels[0].values.triu(1).any()
    assert not panels[1].values.triu(1).any()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if build_example(name).steps is not None])
def test_what_is_written_out_can_be_calculated_again(name):
    one = build_example(name)
    for scene in write_arithmetic(one, 1):
        for line in scene.lines:
            if "becomes" not in line.calculation and "(unchanged)" not in line.calculation:
                values = [value(side) for side in line.calculation.split(" = ")]
                assert max(values) - min(values) < 1e-3  # six products of two numbers near 1, each to four places


def value(written):
    """What a line of arithmetic comes to."""
    text = written.replace("·", "*").replace("e^(", "exp(").replace("-inf", "-inf_")
    return eval(
        re.sub("√([0-9]+)", r"sqrt(\1)", text), {"exp": math.exp, "sqrt": math.sqrt, "tanh": math.tanh, "inf_": math.inf}
    )


@given(st.floats(-1e9, 1e9))
@example(10486.625)
def test_a_numeral_is_the_number_to_four_places_and_never_minus_zero(number):
    text = format_number(number)
    places = number == 0 or 1e-4 <= abs(number) < 1e6  # four of them, and else four digits
    error = RELATIVE_ERROR * abs(number)  # a number with fewer places that is as near as this is written instead
    assert float(text) == pytest.approx(number, abs=error + (0.501e-4 if places else 0.501e-3 * abs(number)))
    assert text != "-0"
