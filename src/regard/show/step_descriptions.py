"""Steps of attention in plain words: a formula and a sentence for each.

Everything here returns values and nothing prints, so that terminal, notebook and page have the same text.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.lectures.example_steps import Example, ExampleStep, StepTable, number_labels
from regard.mechanism import Steps
from regard.show.number_format import format_number, format_rounded

MAX_LETTERS = 24  # maximum letters of a word in a sentence
FORMULAS = {
    "scores": "q kᵀ",
    "capped": "softcap tanh(scaled / softcap)",
    "weights": "softmax({last})",
    "dropped": "dropout(weights)",
    "context": "{last} v",
}


class QueryKeyWords(NamedTuple):
    """The words of the queries and of the keys: the same object, or those of two sentences."""

    queries: Sequence[str]
    keys: Sequence[str]

    @property
    def is_cross(self) -> bool:
        """Return whether the queries attend to another sentence than their own."""
        return self.queries is not self.keys


def describe_example(example: Example) -> tuple[ExampleStep, ...]:
    """Return the `ExampleStep` values of an example: before its steps, one for every step that changes something, and after."""
    if example.steps is None:
        return example.before + example.after
    sentences = write_sentences(example.steps, example.words, example.focus, example.sources) | dict(example.sentences)
    formulas = get_formulas(example.steps, example.scale, example.q) | dict(example.formulas)
    shown = (
        ExampleStep(
            name,
            formulas[name],
            sentences[name],
            make_panels(name, example.steps, example.right, QueryKeyWords(example.words, example.keys)),
        )
        for name in list_active_steps(example.steps)
    )
    return (*example.before, *shown, *example.after)


def list_active_steps(steps: Steps) -> list[str]:
    """List the names of the steps that differ from the one before; scores, weights and context are always included."""
    names = [name for name, _ in steps.items()]
    always = ("scores", "weights", "context")
    return [
        name
        for last, name in zip(["", *names], names, strict=False)
        if name in always or not is_equal(getattr(steps, last), getattr(steps, name))
    ]


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are equal, with NaN equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def get_formulas(steps: Steps, scale: float, q: Tensor | None = None) -> dict[str, str]:
    """Return the formula of each active step, in terms of the active step before it."""
    found, last = {}, "scores"
    width = None if q is None else q.shape[-1]
    formulas = FORMULAS | {"scaled": format_scaling(scale, width), "masked": "{last}" + format_masking(steps)}
    for name in list_active_steps(steps):
        found[name] = formulas[name].format(last=last)
        last = name
    return found


def make_titles(steps: Steps) -> dict[str, str]:
    """Return the formula of each active step as a title; the scale is computed from the scores."""
    largest = steps.scores.abs().nan_to_num(0.0, 0.0).argmax()
    score, scaled = (float(step.flatten()[largest]) for step in (steps.scores, steps.scaled))
    formulas = get_formulas(steps, scaled / score if score else 1.0)
    return {name: f"{name} = {formula}".replace("-inf", "−∞") for name, formula in formulas.items()}


def format_masking(steps: Steps) -> str:
    """Return the formula of bias and mask: the first where a score changed, the second where one was hidden."""
    seen = steps.masked != -torch.inf
    bias = "" if is_equal(steps.masked[seen], steps.capped[seen]) else " + bias"
    return bias + ("" if seen.all() else ", -inf where a query may not see")


def format_scaling(scale: float, width: int | None = None) -> str:
    """Return the formula of scores times scale, as a division by √d where it is one."""
    d = width if width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6) else round(scale**-2) if scale else 0
    return f"scores / √{d}" if d and math.isclose(scale, d**-0.5, rel_tol=1e-6) else f"scores · {format_number(scale)}"


def make_panels(name: str, steps: Steps, right: Steps | None, sides: QueryKeyWords) -> tuple[StepTable, ...]:
    """Make the tables of a step: one, or one per head; two, wrong and right, where `right` differs."""
    values = getattr(steps, name)
    if right is not None and not torch.equal(getattr(right, name), values):
        both = (("WRONG: tril alone", values), ("right: -inf", getattr(right, name)))
        return tuple(make_panel(name, values, sides, title) for title, values in both)
    if values.dim() == 3:
        return tuple(make_panel(name, part, sides, f"head {head}") for head, part in enumerate(values, 1))
    return (make_panel(name, values, sides),)


def make_panel(name: str, values: Tensor, sides: QueryKeyWords, title: str = "") -> StepTable:
    """Make one table of a step: a row per query, and a column per key or per number of the context."""
    asking, answering = map(tuple, sides)
    if name == "context":
        return StepTable(values, asking, number_labels("c", values.shape[-1]), "words", title)
    return StepTable(values, asking, answering, "pairs", title)


def write_sentences(steps: Steps, words: Sequence[str], query: int = -1, sources: Sequence[str] = ()) -> dict[str, str]:
    """Describe what happened to one query at each step: one sentence per step, by its name.

    Shapes: steps (q, k) or (h, q, k), context (q, e) or (h, q, e), one word per query; `sources` are the words of the keys
    where they differ.
    """
    sides = QueryKeyWords(words, sources or words)
    query = range(len(words))[query]
    heads = [Steps(*(part[head] for _, part in steps.items())) for head in range(len(steps.scores))]
    parts = [steps] if steps.scores.dim() == 2 else heads
    sentences = {
        name: join_head_sentences([say(part, sides, query) for part in parts]) for name, say in HEAD_DESCRIBERS.items()
    }
    shared = {name: say(steps, sides, query) for name, say in SHARED_DESCRIBERS.items()}
    return sentences | shared


def join_head_sentences(parts: Sequence[str]) -> str:
    """Join the sentences of all heads into one, of the first four where there are more."""
    if len(parts) == 1:
        return capitalize_sentence(parts[0])
    sentence = "; ".join(f"head {head}: {part.rstrip('.')}" for head, part in enumerate(parts[:4], 1))
    return capitalize_sentence(sentence + ("; and so on." if len(parts) > 4 else "."))


def capitalize_sentence(text: str) -> str:
    """Capitalize a sentence that starts with one of our own words; a word of the text is quoted and stays as written."""
    return text[0].upper() + text[1:]


def describe_scores(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe which key matches best, and which least."""
    row, asks, name = steps.scores[query], make_namer(sides.queries)(query), make_namer(sides.keys)
    if len(row) == 1:
        return f"{asks} is compared only with {name(0) if sides.is_cross else 'itself'} ({format_rounded(row[0])})."
    best, least = int(row.argmax()), int(row.argmin())
    if row[best] == row[least]:
        return f"{asks} matches every word equally ({format_rounded(row[best])})."
    return (
        f"{asks} matches {name(best)} best ({format_rounded(row[best])}), {name(least)} least ({format_rounded(row[least])})."
    )


def describe_scaling(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe that the order of the scores stays and how their spread changes, in the head with the largest spread."""
    rows = (steps.scores[..., query, :], steps.scaled[..., query, :])
    before, after = (float((row.amax(-1) - row.amin(-1)).max()) for row in rows)
    asks = make_namer(sides.queries)(query)
    return (
        f"The order of the scores is unchanged; the scores of {asks} now differ by at most {format_rounded(after)}, "
        f"before by {format_rounded(before)}."
    )


def describe_capping(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe how much the softcap reduced the largest score."""
    return (
        f"No score can exceed the cap: the largest, {format_rounded(steps.scaled.max())}, became "
        f"{format_rounded(steps.capped.max())}."
    )


def describe_masking(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe how many keys the query may see."""
    hidden = steps.masked.reshape(-1, *steps.masked.shape[-2:])[0] == -torch.inf  # heads share a mask
    visible_count, asks = int((~hidden[query]).sum()), make_namer(sides.queries)(query)
    return (
        f"{asks} may see {visible_count} of {hidden.shape[1]} words; {int(hidden.sum())} of {hidden.numel()} pairs are hidden."
    )


def describe_weights(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe which of the visible keys the query attends to most and least."""
    asks, name = make_namer(sides.queries)(query), make_namer(sides.keys)
    row, visible = steps.weights[query], steps.masked[query] != -torch.inf
    if row.isnan().any():
        return f"the weights of {asks} are not numbers: its scores contain a NaN."
    if not visible.any():
        return f"{asks} may see nothing, so all its weights are 0."
    best = int(row.argmax())
    least = int(row.masked_fill(~visible, torch.inf).argmin())
    if int(visible.sum()) == 1:
        return f"{asks} attends to {name(best)} alone ({format_rounded(row[best])})."
    if row[best] == row[least]:
        return f"{asks} attends equally to the {int(visible.sum())} words it sees ({format_rounded(row[best])} each)."
    return (
        f"{asks} attends most to {name(best, format_rounded(row[best]))}, least to {name(least, format_rounded(row[least]))}."
    )


def describe_dropout(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe how many weights were dropped, and by what factor the others grew."""
    had_weight, has_weight = steps.weights > 0, steps.dropped > 0
    fallen = int((had_weight & ~has_weight).sum())
    rest = (
        f", the others are {format_rounded((steps.dropped[has_weight] / steps.weights[has_weight]).mean())} times as large"
        if has_weight.any()
        else ""
    )
    own, asks = int(has_weight[query].sum()), make_namer(sides.queries)(query)
    weights, in_row = int(had_weight.sum()), int(had_weight[query].sum())
    return f"{fallen} of {weights} weights were set to 0{rest}; {asks} keeps {own} of {in_row}."


def describe_context(steps: Steps, sides: QueryKeyWords, query: int) -> str:
    """Describe what the new vector of the query is mixed from."""
    asks, name, row = make_namer(sides.queries)(query), make_namer(sides.keys), steps.dropped[query]
    order = [int(key) for key in row.argsort(descending=True, stable=True) if row[key] > 0]
    if not order:
        return f"{asks} attends to nothing: its new vector is 0."
    terms = " + ".join(f"{format_rounded(row[key])} {name(key)}" for key in order[:3]) + (" + ..." if len(order) > 3 else "")
    vector = ", ".join(format_rounded(number) for number in steps.context[query][:4]) + (
        ", ..." if steps.context.shape[-1] > 4 else ""
    )
    return f"{asks} {'receives' if sides.is_cross else 'becomes'} {terms} = ({vector})."


Describer = Callable[[Steps, QueryKeyWords, int], str]
HEAD_DESCRIBERS: dict[str, Describer] = {
    "scores": describe_scores,
    "weights": describe_weights,
    "dropped": describe_dropout,
    "context": describe_context,
}
SHARED_DESCRIBERS: dict[str, Describer] = {
    "scaled": describe_scaling,
    "capped": describe_capping,
    "masked": describe_masking,
}  # one for all heads, of the steps of all


def make_namer(words: Sequence[str]) -> Callable[..., str]:
    """Return a function that quotes the word at an index; its position, where it occurs more than once, and notes follow."""

    def name_word(index: int, *notes: str) -> str:
        word = words[index] if len(words[index]) <= MAX_LETTERS else words[index][: MAX_LETTERS - 1] + "…"
        inside = [f"token {index}", *notes] if words.count(words[index]) > 1 else notes
        return f"‘{word}’ ({', '.join(inside)})" if inside else f"‘{word}’"

    return name_word
