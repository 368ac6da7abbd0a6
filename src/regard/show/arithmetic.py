"""The arithmetic of one row of attention: products and their sums, exponentials, the division, the weighted sum of values."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.lectures.scenes import Example, Line, Scene
from regard.mechanism import Steps
from regard.show.narration import FORMULAS, formulas_of, names
from regard.show.numerals import numeral

TERMS = 8  # terms of a sum that are written out; the rest is counted


def arithmetic(example: Example, query: int, keys: range | None = None) -> tuple[Scene, ...]:
    """Write out every step of one row: products and sums, exponentials, the division, the weighted sum of values.

    `query` counts from 0. `keys` are the keys whose lines are written, by default all; sums go over all keys. Raises
    ConfigError where the example has no attention steps.
    """
    if example.steps is None:
        raise ConfigError(f"the example '{example.name}' attends to no sentence, so there is no word to ask about.")
    keys = range(len(example.keys)) if keys is None else keys
    if example.steps.scores.dim() == 2:
        return row_of(example, example.steps, example.q, example.k, example.v, query, keys)
    scenes = []
    for head in range(len(example.steps.scores)):
        steps = Steps(*(part[head] for _, part in example.steps.items()))
        q, k, v = (None if part is None else part[head] for part in (example.q, example.k, example.v))
        for scene in row_of(example, steps, q, k, v, query, keys):
            scenes.append(Scene(f"head {head + 1}: {scene.name}", scene.formula, scene.sentence, (), scene.lines))
    return tuple(scenes)


def row_of(
    example: Example, steps: Steps, q: Tensor | None, k: Tensor | None, v: Tensor | None, query: int, keys: range
) -> tuple[Scene, ...]:
    """Write out the arithmetic of one row of one head."""
    words, row = example.keys, Steps(*(part[query] for _, part in steps.items()))
    asks, formulas = names(example.words)(query), formulas_of(steps, example.scale, q) | dict(example.formulas)
    scenes = [scores_written(example, row, None if q is None else q[query], k, asks, keys)]
    if "scaled" in formulas:
        lines = tuple(Line(words[j], f"{numeral(row.scores[j])} {factor(formulas)} = {numeral(row.scaled[j])}") for j in keys)
        scenes.append(Scene("scaled", formulas["scaled"], "Every score of the row is changed by the same factor.", (), lines))
    if "masked" in formulas:
        lines = tuple(Line(words[j], became(row.capped[j], row.masked[j])) for j in keys)
        said = example.sentences.get("masked", "A score of -inf will have the exponential 0, and so the weight 0.")
        scenes.append(Scene("masked", formulas["masked"], said, (), lines))
    scenes += exponentials(words, row, keys)
    if "dropped" in formulas:
        lines = tuple(Line(words[j], became(row.weights[j], row.dropped[j])) for j in keys)
        said = "A weight falls to 0, or grows so that the sum stays what it was on average."
        scenes.append(Scene("dropped", formulas["dropped"], said, (), lines))
    if example.right is not None:
        lines = tuple(Line(words[j], numeral(example.right.weights[query, j])) for j in keys)
        scenes.append(Scene("right weights", "softmax with -inf", "These are the weights that the row should have.", (), lines))
    if v is not None:
        scenes.append(context_written(row, v, formulas["context"], asks))
    return tuple(scenes)


def factor(formulas: dict[str, str]) -> str:
    """Return what the formula of the scaled scores does to a score, for example '/ √2'."""
    return formulas["scaled"].removeprefix("scores ")


def became(before: Tensor, after: Tensor) -> str:
    """Format a number before and after a step."""
    return numeral(after) + " (stays)" if torch.equal(before, after) else f"{numeral(before)} becomes {numeral(after)}"


def scores_written(example: Example, row: Steps, q: Tensor | None, k: Tensor | None, asks: str, keys: range) -> Scene:
    """Write out the products and sums behind the scores of a row, or list the scores where q and k are not given."""
    formula = {**FORMULAS, **example.formulas}["scores"]
    if q is None or k is None:
        given = tuple(Line(example.keys[j], numeral(row.scores[j])) for j in keys)
        return Scene("scores", formula, f"The scores of {asks} as they are given.", (), given)
    if example.weight is None:
        said = f"The numbers of {asks} times those of each word, and the sum of these products."
        lines = [Line(example.keys[j], products(q, k[j], row.scores[j])) for j in keys]
    else:
        said = f"The numbers of {asks} plus those of each word, bent by tanh, weighed and summed."
        lines = [Line(example.keys[j], bent(q, k[j], example.weight, row.scores[j])) for j in keys]
    return Scene("scores", formula, said, (), tuple(lines))


def products(q: Tensor, k: Tensor, score: Tensor) -> str:
    """Format the dot product a·b + c·d = ab + cd = score."""
    pairs = enumerate(zip(q, k, strict=True))
    factors = total([f"{numeral(a, within=n > 0)}·{numeral(b, within=True)}" for n, (a, b) in pairs], plus=True)
    if len(q) == 1:
        return f"{factors} = {numeral(score)}"
    return f"{factors} = {total([numeral(product) for product in q * k])} = {numeral(score)}"


def bent(q: Tensor, k: Tensor, weight: Tensor, score: Tensor) -> str:
    """Format the additive score w·tanh(a + b) + ... = score."""
    triples = zip(weight, q, k, strict=True)
    terms = [f"{numeral(w, within=n > 0)}·tanh({total([numeral(a), numeral(b)])})" for n, (w, a, b) in enumerate(triples)]
    values = [numeral(value) for value in weight * (q + k).tanh()]
    return f"{total(terms, plus=True)} = {total(values)} = {numeral(score)}"


def total(terms: Sequence[str], *, plus: bool = False) -> str:
    """Join terms by + and -, or by + alone if `plus`; terms after the first 8 are only counted."""
    written = terms[0]
    for term in terms[1:TERMS]:
        written += f" - {term[1:]}" if term.startswith("-") and not plus else f" + {term}"
    return written + (f" + ... ({len(terms) - TERMS} more)" if len(terms) > TERMS else "")


def exponentials(words: Sequence[str], row: Steps, keys: range) -> list[Scene]:
    """Write out the stable softmax of a row: the exponents, the exponentials and their sum, and the share of each key."""
    masked = row.masked
    if bool((masked == -torch.inf).all()):
        return [Scene("weights", "0", "The query may see nothing, so there is nothing to divide: all weights are 0.")]
    top = masked.max()
    raised = (masked - top).exp()
    whole = raised.sum()
    lines = [Line(words[j], f"e^({total([numeral(masked[j]), numeral(-top)])}) = {numeral(raised[j])}") for j in keys]
    lines.append(Line("sum", f"{total([numeral(number) for number in raised])} = {numeral(whole)}"))
    said = f"The greatest score, {numeral(top)}, is subtracted first: no weight changes by it, and no exponential can overflow."
    shares = tuple(Line(words[j], f"{numeral(raised[j])} / {numeral(whole)} = {numeral(row.weights[j])}") for j in keys)
    return [
        Scene("exponentials", "e^(score - greatest)", said, (), tuple(lines)),
        Scene("weights", "exponential / sum", f"The weights sum to {numeral(row.weights.sum())}.", (), shares),
    ]


def context_written(row: Steps, v: Tensor, formula: str, asks: str) -> Scene:
    """Write out the weighted sum of the values, number by number, for at most the first 8 numbers."""
    lines = tuple(
        Line(f"c{number}", products(row.dropped, column, mixed))
        for number, (column, mixed) in enumerate(zip(v.T[:TERMS], row.context, strict=False), 1)
    )
    more = f" The first {TERMS} of {v.shape[-1]} numbers are written out." if v.shape[-1] > TERMS else ""
    return Scene(
        "context",
        formula,
        f"Each number of the new vector of {asks}: weight times value, summed over the words.{more}",
        (),
        lines,
    )
