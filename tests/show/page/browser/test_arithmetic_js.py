"""A number written out on the page is the sum that it says: what stands left of the = comes to what stands right of it."""

import math
import re

import pytest

from regard.lectures.examples import EXAMPLES, build_example
from regard.show import arithmetic
from regard.show.number_format import format_number
from regard.show.page.session import Session
from regard.show.page.steps_json import get_example_steps
from show.page.browser.problems import call_function, draw_problems
from show.page.browser.recordings import draw_queries_and_keys, record_layers

PLACES = 2e-3  # six products of two numbers up to 3, each to four places: 6 x 2 x 3 x 0.5e-4
MODULE = "views/steps/arithmetic"
STEPS = ("scores", "scaled", "capped", "masked", "weights", "dropped", "context")
MEANINGS = {"e": math.e, "tanh": math.tanh, "sqrt": math.sqrt, "inf": math.inf}


@pytest.fixture(scope="module")
def address(serving):
    return serving(Session(record_layers(*draw_queries_and_keys(1, 1, 3), ["a", "b", "c"])))


def collect_arithmetic(page, problems: list[dict]) -> list[list[tuple[str, str, float]]]:
    """For each problem (step, calculation, number) of every number of every step that it has."""
    found = []
    for problem, steps in zip(
        problems, call_function(page, "views/steps/attend", "attend", [[one] for one in problems]), strict=True
    ):
        named = [name for name in STEPS if steps[name] is not None and (name != "capped" or problem.get("softcap"))]
        places = [(name, i, j) for name in named for i, row in enumerate(steps[name]) for j in range(len(row))]
        kept = {name: [[float(value) for value in row] for row in steps[name]] for name in named}
        lines = call_function(page, MODULE, "writeArithmetic", [[name, problem, steps, i, j] for name, i, j in places])
        told = zip(places, lines, strict=True)
        found.append([(name, line, kept[name][i][j]) for (name, i, j), line in told])
    return found


def value(formula: str) -> float:
    """What a calculation comes to."""
    plain = formula.replace("·", "*").replace("√", "sqrt").replace("^", "**")
    return float(eval(re.sub(r"sqrt([\d.]+)", r"sqrt(\1)", plain), {"__builtins__": {}}, MEANINGS))


def finite(problems: list[tuple]) -> list[dict]:
    """Problems in which every query sees every key: what JSON cannot carry is another test's."""
    return [problem | {"visible": None} for problem, _, _ in problems]


def test_every_calculation_comes_to_the_number_of_its_step(open_page, address):
    checked = dict.fromkeys(STEPS, 0)
    for lines in collect_arithmetic(open_page(address), finite(draw_problems(40))):
        for name, line, number in lines:
            assert line, name
            left, _, right = line.partition(" = ")
            if not right:  # a number that stays, is given or becomes another
                assert format_number(number) in line
                continue
            assert right == format_number(number)
            if "more)" not in left:
                assert value(left) == pytest.approx(number, abs=PLACES, rel=PLACES), (name, line)
                checked[name] += 1
    assert all(count > 100 for name, count in checked.items() if name not in ("masked", "dropped"))


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_stands_in_the_exponent(open_page, address, temperature):
    problems = [problem | {"temperature": temperature} for problem in finite(draw_problems(12))]
    for lines in collect_arithmetic(open_page(address), problems):
        shares = [(line.partition(" = ")[0], number) for name, line, number in lines if name == "weights"]
        for left, number in shares:
            assert f" / {format_number(temperature)}" in left
            assert value(left) == pytest.approx(number, abs=PLACES, rel=PLACES)


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name not in ("heads", "split") and build_example(name).steps is not None]
)
def test_a_lectures_row_is_written_as_regard_walk_writes_it(open_page, address, name):
    known, problem = build_example(name), get_example_steps(name)
    page = open_page(address)
    (steps,) = call_function(page, "views/steps/attend", "attend", [[problem]])
    for scene in arithmetic.write_arithmetic(known, known.focus):
        if scene.name not in ("scores", "scaled") or known.q is None:
            continue
        right = [re.sub(r" = .* = ", " = ", line.calculation) for line in scene.lines]  # walk has the products besides
        given = [[scene.name, problem, steps, known.focus, j] for j in range(len(known.words))]
        assert [shorten_sum(line) for line in call_function(page, MODULE, "writeArithmetic", given)] == [
            shorten_sum(line) for line in right
        ]


def shorten_sum(line: str) -> str:
    """A calculation without its terms past the first six, of which the page only tells how many."""
    left, _, right = line.partition(" = ")
    terms = [term for term in left.split(" + ") if not term.startswith("...")]
    return " + ".join(terms[:6]) + " = " + right


def test_what_may_not_be_seen_becomes_minus_infinity_and_a_weight_of_nothing(open_page, address):
    page = open_page(address)
    problem = {"q": [[1.0, 2.0]], "k": [[0.5, 1.0], [1.0, 0.0]], "scale": 1, "visible": [[True, False]]}
    code = """async (problem) => {
        const {attend} = await import("./static/views/steps/attend.js");
        const {writeArithmetic} = await import("./static/views/steps/arithmetic.js");
        const seen = attend(problem);
        const blind = attend({...problem, visible: [[false, false]]});
        return [writeArithmetic("masked", problem, seen, 0, 1), writeArithmetic("masked", problem, seen, 0, 0),
            writeArithmetic("weights", problem, seen, 0, 1), writeArithmetic("weights", problem, blind, 0, 0)];
    }"""
    hidden, stays, share, nothing = page.evaluate(code, problem)
    assert hidden == "1 becomes -inf"
    assert stays == "2.5 (unchanged)"
    assert share == "e^(-inf - 2.5) / 1 = 0"
    assert nothing == "0, because all scores are -inf"
