"""The formula, its sentences and its numerals in JavaScript say what attend, the narration and the numerals say in Python."""

import math
import re

import pytest
import torch

import regard
from bounds import assert_within
from regard.lectures.examples import EXAMPLES, build_example
from regard.mechanism import Causal, Steps
from regard.show import step_descriptions
from regard.show.number_format import format_number, format_rounded
from regard.show.page.session import Session
from regard.show.page.steps_json import get_example_steps
from show.page.browser.problems import call_function, draw_problems
from show.page.browser.recordings import draw_queries_and_keys, record_layers
from show.page.step_bounds import step_bounds

PROBLEMS, DRAWS = 300, 3000
WORDS = ["the", "cat", "the", "sleeps", "and", "purrs", "while"]
TELL = """async (problems) => {
  const {attend} = await import("./static/views/steps/attend.js");
  const {writeFormulas, writeSentences} = await import("./static/views/steps/narration.js");
  return problems.map(({problem, words, query}) => {
    const steps = attend(problem);
    return [writeFormulas(steps, problem), writeSentences(steps, words, words, query)];
  });
}"""


@pytest.fixture(scope="module")
def address(serving):
    return serving(Session(record_layers(*draw_queries_and_keys(1, 1, 3), ["a", "b", "c"])))


def as_tensor(rows: list) -> torch.Tensor:
    return torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)


def assert_equal_steps(found: dict, steps: Steps, **close: float) -> None:
    for name, right in steps.items():
        torch.testing.assert_close(
            as_tensor(found[name]), right.double(), **close, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_every_step_is_what_attend_gives(open_page, address):
    problems = draw_problems(PROBLEMS)
    answers = call_function(open_page(address), "views/steps/attend", "attend", [[problem] for problem, _, _ in problems])
    for found, (_, steps, _) in zip(answers, problems, strict=True):
        assert_equal_steps(found, steps, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 3.0])
def test_a_temperature_divides_what_the_softmax_takes(open_page, address, temperature):
    problems = [problem for problem, _, _ in draw_problems(40) if problem["sink"] is None]
    answers = call_function(
        open_page(address), "views/steps/attend", "attend", [[problem | {"temperature": temperature}] for problem in problems]
    )
    for found in answers:
        right = regard.mechanism.softmax.stable(as_tensor(found["masked"]) / temperature)
        torch.testing.assert_close(as_tensor(found["weights"]), right, rtol=1e-12, atol=1e-12)


def test_the_switches_are_attend_with_another_mask_and_scale(open_page, address):
    problems = [
        (problem, steps) for problem, steps, _ in draw_problems(60) if problem["sink"] is None and problem["softcap"] is None
    ]
    page = open_page(address)
    settings = {"mask": "causal", "root": True}
    changed = call_function(page, "views/steps/attend", "applySwitches", [[problem, settings] for problem, _ in problems])
    answers = call_function(page, "views/steps/attend", "attend", [[problem] for problem in changed])
    for found, (problem, _) in zip(answers, problems, strict=True):
        q, k, v = (torch.tensor(problem[name], dtype=torch.float64) for name in "qkv")
        bias = None if problem["bias"] is None else torch.tensor(problem["bias"], dtype=torch.float64)
        assert_equal_steps(found, regard.attend(q, k, v, Causal(), bias=bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if build_example(name).steps is not None])
def test_the_lectures_examples_come_out_to_the_digit(open_page, address, name):
    known = build_example(name)
    told = [get_example_steps(name, head) for head in range(get_example_steps(name)["heads"])]
    for head, found in enumerate(call_function(open_page(address), "views/steps/attend", "attend", [[one] for one in told])):
        right = known.steps if known.steps.scores.dim() == 2 else Steps(*(part[head] for _, part in known.steps.items()))
        exact = {name: as_tensor(found[name]) for name, _ in right.items()}
        bounds = step_bounds(told[head], exact["weights"])
        for step, value in right.items():
            assert_within(value, exact[step], bounds[step], step)


def test_the_page_says_what_the_terminal_says(open_page, address):
    problems = draw_problems(PROBLEMS)
    given = [
        {"problem": problem, "words": WORDS[: len(problem["q"])], "query": n % len(problem["q"])}
        for n, (problem, _, _) in enumerate(problems)
    ]
    for (formulas, said), one, (problem, steps, scale) in zip(
        open_page(address).evaluate(TELL, given), given, problems, strict=True
    ):
        assert formulas == step_descriptions.get_formulas(steps, scale, torch.tensor(problem["q"]))
        right = step_descriptions.write_sentences(steps, one["words"], one["query"])
        told = {name: re.sub(r"\(word (\d+)\)|\bwords?\b", name_tokens, right[name]) for name in said}
        assert {name: text.lower() for name, text in said.items()} == {name: text.lower() for name, text in told.items()}


def name_tokens(found: re.Match) -> str:
    """The page names and counts tokens, from 0 everywhere, regard walk the words of the lectures, from 1."""
    return f"(token {int(found[1]) - 1})" if found[1] else found[0].replace("word", "token")


def test_numbers_are_written_as_in_python(open_page, address):
    generator = torch.Generator().manual_seed(1)
    powers, signs = (torch.rand(DRAWS, generator=generator, dtype=torch.float64) for _ in range(2))
    numbers = [
        math.copysign(10 ** (16 * power - 8), sign - 0.5) for power, sign in zip(powers.tolist(), signs.tolist(), strict=True)
    ]
    numbers += [0.0, 0.125, -0.125, 0.375, 2.5, 0.0949, 0.0951, 0.03125, 1e-4, 1e6, 123456.5]  # some lie exactly in the middle
    halves = torch.tensor([(n * 7919 % 20_000 + 0.5) / 10**places for places in (2, 4) for n in range(200)])  # in float32
    numbers += [x for ulps in (-3, 0, 3) for x in (halves * (1 + ulps * 2**-23)).tolist()]
    page = open_page(address)
    assert call_function(page, "drawing/number_format", "formatNumber", [[number] for number in numbers]) == [
        format_number(number) for number in numbers
    ]
    assert call_function(page, "drawing/number_format", "formatRounded", [[number] for number in numbers]) == [
        format_rounded(number) for number in numbers
    ]


WRITE_CELLS = """async (values) => {
  const { createQuantity } = await import("./static/drawing/quantity.js");
  return values.map((value) => createQuantity("weight").writeCell(value));
}"""


def test_the_weights_in_the_cells_of_a_map_are_rounded_and_not_cut(open_page, address):
    values = [0.0, 1.0, 0.995, 0.00499, 0.0049, 0.00199, 9.99e-4, 9.4e-4, 9.51e-4, 1.96e-5, 2.0**-32]
    values += torch.rand(200, generator=torch.Generator().manual_seed(5), dtype=torch.float64).pow(9).tolist()
    for value, text in zip(values, open_page(address).evaluate(WRITE_CELLS, values), strict=True):
        digits, power = [*text.replace("−", "-").split("e"), "0"][:2]
        unit = 10.0 ** (int(power) - len(digits.partition(".")[2]))
        assert abs(float(digits) * 10.0 ** int(power) - value) <= 0.5001 * unit, (value, text)
        assert len(text) <= 5, text
