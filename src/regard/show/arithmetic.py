"""The arithmetic of one row of attention: products and their sums, exponentials, the division, the weighted sum of values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.lectures.example_steps import Example, ExampleStep, Line
from regard.mechanism import Steps
from regard.show.number_format import format_number
from regard.show.step_descriptions import FORMULAS, get_formulas, make_namer

MAX_TERMS = 8  # terms of a sum that are written out; the rest is counted


def write_arithmetic(example: Example, query: int, keys: range | None = None) -> tuple[ExampleStep, ...]:
    """Write out every step of one row: products and sums, exponentials, the division, the weighted sum of values.

    `query` counts from 0. `keys` are the keys whose lines are written, by default all; sums go over all keys. Raises
    ConfigError where the example has no attention steps.
    """
    if example.steps is None:
        raise ConfigError(f"the example '{example.name}' has no sentence, so it has no row to write out.")
    keys = range(len(example.keys)) if keys is None else keys
    if example.steps.scores.dim() == 2:
        return write_row(example, example.steps, example.q, example.k, example.v, query, keys)
    shown = []
    for head in range(len(example.steps.scores)):
        steps = Steps(*(part[head] for _, part in example.steps.items()))
        q, k, v = (None if part is None else part[head] for part in (example.q, example.k, example.v))
        for one in write_row(example, steps, q, k, v, query, keys):
            shown.append(ExampleStep(f"head {head + 1}: {one.name}", one.formula, one.sentence, (), one.lines))
    return tuple(shown)


def write_row(
    example: Example, steps: Steps, q: Tensor | None, k: Tensor | None, v: Tensor | None, query: int, keys: range
) -> tuple[ExampleStep, ...]:
    """Write out the arithmetic of one row of one head."""
    words, row = example.keys, Steps(*(part[query] for _, part in steps.items()))
    asks, formulas = make_namer(example.words)(query), get_formulas(steps, example.scale, q) | dict(example.formulas)
    shown = [write_scores(example, row, None if q is None else q[query], k, asks, keys)]
    if "scaled" in formulas:
        lines = tuple(
            Line(words[j], f"{format_number(row.scores[j])} {format_factor(formulas)} = {format_number(row.scaled[j])}")
            for j in keys
        )
        shown.append(
            ExampleStep("scaled", formulas["scaled"], "Every score of the row is multiplied by the same factor.", (), lines)
        )
    if "masked" in formulas:
        lines = tuple(Line(words[j], format_change(row.capped[j], row.masked[j])) for j in keys)
        sentence = example.sentences.get("masked", "A score of -inf has the exponential 0, so its weight is 0.")
        shown.append(ExampleStep("masked", formulas["masked"], sentence, (), lines))
    shown += write_softmax(words, row, keys)
    if "dropped" in formulas:
        lines = tuple(Line(words[j], format_change(row.weights[j], row.dropped[j])) for j in keys)
        sentence = "A weight is set to 0 or enlarged, so that on average the sum is unchanged."
        shown.append(ExampleStep("dropped", formulas["dropped"], sentence, (), lines))
    if example.right is not None:
        lines = tuple(Line(words[j], format_number(example.right.weights[query, j])) for j in keys)
        shown.append(
            ExampleStep("right weights", "softmax with -inf", "These are the weights that the row should have.", (), lines)
        )
    if v is not None:
        shown.append(write_context(row, v, formulas["context"], asks))
    return tuple(shown)


def format_factor(formulas: dict[str, str]) -> str:
    """Return what the formula of the scaled scores does to a score, for example '/ √2'."""
    return formulas["scaled"].removeprefix("scores ")


def format_change(before: Tensor, after: Tensor) -> str:
    """Format a number before and after a step."""
    return (
        format_number(after) + " (unchanged)"
        if torch.equal(before, after)
        else f"{format_number(before)} becomes {format_number(after)}"
    )


def write_scores(example: Example, row: Steps, q: Tensor | None, k: Tensor | None, asks: str, keys: range) -> ExampleStep:
    """Write out the products and sums behind the scores of a row, or list the scores where q and k are not given."""
    formula = {**FORMULAS, **example.formulas}["scores"]
    if q is None or k is None:
        given = tuple(Line(example.keys[j], format_number(row.scores[j])) for j in keys)
        return ExampleStep("scores", formula, f"The given scores of {asks}.", (), given)
    if example.weight is None:
        sentence = f"The numbers of {asks} times those of each word, and the sum of these products."
        lines = [Line(example.keys[j], format_dot_product(q, k[j], row.scores[j])) for j in keys]
    else:
        sentence = f"The numbers of {asks} plus those of each word, passed through tanh, weighted and summed."
        lines = [Line(example.keys[j], format_additive_score(q, k[j], example.weight, row.scores[j])) for j in keys]
    return ExampleStep("scores", formula, sentence, (), tuple(lines))


def format_dot_product(q: Tensor, k: Tensor, score: Tensor) -> str:
    """Format the dot product a·b + c·d = ab + cd = score."""
    pairs = enumerate(zip(q, k, strict=True))
    factors = join_terms(
        [f"{format_number(a, is_inner=n > 0)}·{format_number(b, is_inner=True)}" for n, (a, b) in pairs], plus=True
    )
    if len(q) == 1:
        return f"{factors} = {format_number(score)}"
    return f"{factors} = {join_terms([format_number(product) for product in q * k])} = {format_number(score)}"


def format_additive_score(q: Tensor, k: Tensor, weight: Tensor, score: Tensor) -> str:
    """Format the additive score w·tanh(a + b) + ... = score."""
    triples = zip(weight, q, k, strict=True)
    terms = [
        f"{format_number(w, is_inner=n > 0)}·tanh({join_terms([format_number(a), format_number(b)])})"
        for n, (w, a, b) in enumerate(triples)
    ]
    values = [format_number(value) for value in weight * (q + k).tanh()]
    return f"{join_terms(terms, plus=True)} = {join_terms(values)} = {format_number(score)}"


def join_terms(terms: Sequence[str], *, plus: bool = False) -> str:
    """Join terms by + and -, or by + alone if `plus`; terms after the first 8 are only counted."""
    joined = terms[0]
    for term in terms[1:MAX_TERMS]:
        joined += f" - {term[1:]}" if term.startswith("-") and not plus else f" + {term}"
    return joined + (f" + ... ({len(terms) - MAX_TERMS} more)" if len(terms) > MAX_TERMS else "")


def write_softmax(words: Sequence[str], row: Steps, keys: range) -> list[ExampleStep]:
    """Write out the stable softmax of a row: the exponents, the exponentials and their sum, and the share of each key."""
    masked = row.masked
    if bool((masked == -torch.inf).all()):
        return [ExampleStep("weights", "0", "The query may see nothing, so all its weights are 0.")]
    top = masked.max()
    exponentials = (masked - top).exp()
    total = exponentials.sum()
    lines = [
        Line(words[j], f"e^({join_terms([format_number(masked[j]), format_number(-top)])}) = {format_number(exponentials[j])}")
        for j in keys
    ]
    lines.append(Line("sum", f"{join_terms([format_number(number) for number in exponentials])} = {format_number(total)}"))
    sentence = f"The greatest score, {format_number(top)}, is subtracted first: this changes no weight and prevents overflow."
    shares = tuple(
        Line(words[j], f"{format_number(exponentials[j])} / {format_number(total)} = {format_number(row.weights[j])}")
        for j in keys
    )
    return [
        ExampleStep("exponentials", "e^(score - greatest)", sentence, (), tuple(lines)),
        ExampleStep("weights", "exponential / sum", f"The weights sum to {format_number(row.weights.sum())}.", (), shares),
    ]


def write_context(row: Steps, v: Tensor, formula: str, asks: str) -> ExampleStep:
    """Write out the weighted sum of the values, number by number, for at most the first 8 numbers."""
    lines = tuple(
        Line(f"c{number}", format_dot_product(row.dropped, column, value))
        for number, (column, value) in enumerate(zip(v.T[:MAX_TERMS], row.context, strict=False), 1)
    )
    note = f" The first {MAX_TERMS} of {v.shape[-1]} numbers are written out." if v.shape[-1] > MAX_TERMS else ""
    return ExampleStep(
        "context",
        formula,
        f"Each number of the new vector of {asks}: weight times value, summed over the words.{note}",
        (),
        lines,
    )
