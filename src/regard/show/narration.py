"""Steps of attention in plain words: a formula and a sentence for each.

Everything here returns values and nothing prints, so that terminal, notebook and page have the same text.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.lectures.scenes import Example, Panel, Scene, numbered
from regard.mechanism import Steps
from regard.show.numerals import numeral, rough

LONGEST = 24  # maximum letters of a word in a sentence
FORMULAS = {
    "scores": "q kᵀ",
    "capped": "softcap tanh(scaled / softcap)",
    "weights": "softmax({last})",
    "dropped": "dropout(weights)",
    "context": "{last} v",
}


class Sides(NamedTuple):
    """The words of the queries and of the keys: the same object, or those of two sentences."""

    asking: Sequence[str]
    answering: Sequence[str]

    @property
    def apart(self) -> bool:
        """Return whether the queries attend to another sentence than their own."""
        return self.asking is not self.answering


def tell(example: Example) -> tuple[Scene, ...]:
    """Return the `Scene` values of an example: before its steps, one for every step that changes something, and after."""
    if example.steps is None:
        return example.before + example.after
    said = sentences(example.steps, example.words, example.focus, example.sources) | dict(example.sentences)
    formulas = formulas_of(example.steps, example.scale, example.q) | dict(example.formulas)
    told = (
        Scene(name, formulas[name], said[name], panels(name, example.steps, example.right, Sides(example.words, example.keys)))
        for name in active(example.steps)
    )
    return (*example.before, *told, *example.after)


def active(steps: Steps) -> list[str]:
    """List the names of the steps that differ from the one before; scores, weights and context are always included."""
    names = [name for name, _ in steps.items()]
    always = ("scores", "weights", "context")
    return [
        name
        for last, name in zip(["", *names], names, strict=False)
        if name in always or not same(getattr(steps, last), getattr(steps, name))
    ]


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are equal, with NaN equal to NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def formulas_of(steps: Steps, scale: float, q: Tensor | None = None) -> dict[str, str]:
    """Return the formula of each active step, in terms of the active step before it."""
    found, last = {}, "scores"
    width = None if q is None else q.shape[-1]
    told = FORMULAS | {"scaled": scaling(scale, width), "masked": "{last}" + masking(steps)}
    for name in active(steps):
        found[name] = told[name].format(last=last)
        last = name
    return found


def titles(steps: Steps) -> dict[str, str]:
    """Return the formula of each active step as a title; the scale is computed from the scores."""
    largest = steps.scores.abs().nan_to_num(0.0, 0.0).argmax()
    score, scaled = (float(step.flatten()[largest]) for step in (steps.scores, steps.scaled))
    told = formulas_of(steps, scaled / score if score else 1.0)
    return {name: f"{name} = {formula}".replace("-inf", "−∞") for name, formula in told.items()}


def masking(steps: Steps) -> str:
    """Return the formula of bias and mask: the first where a score changed, the second where one was hidden."""
    seen = steps.masked != -torch.inf
    bias = "" if same(steps.masked[seen], steps.capped[seen]) else " + bias"
    return bias + ("" if seen.all() else ", -inf where a query may not see")


def scaling(scale: float, width: int | None = None) -> str:
    """Return the formula of scores times scale, as a division by √d where it is one."""
    d = width if width is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6) else round(scale**-2) if scale else 0
    return f"scores / √{d}" if d and math.isclose(scale, d**-0.5, rel_tol=1e-6) else f"scores · {numeral(scale)}"


def panels(name: str, steps: Steps, right: Steps | None, sides: Sides) -> tuple[Panel, ...]:
    """Make the tables of a step: one, or one per head; two, wrong and right, where `right` differs."""
    values = getattr(steps, name)
    if right is not None and not torch.equal(getattr(right, name), values):
        both = (("WRONG: tril alone", values), ("right: -inf", getattr(right, name)))
        return tuple(panel(name, values, sides, title) for title, values in both)
    if values.dim() == 3:
        return tuple(panel(name, part, sides, f"head {head}") for head, part in enumerate(values, 1))
    return (panel(name, values, sides),)


def panel(name: str, values: Tensor, sides: Sides, title: str = "") -> Panel:
    """Make one table of a step: a row per query, and a column per key or per number of the context."""
    asking, answering = map(tuple, sides)
    if name == "context":
        return Panel(values, asking, numbered("c", values.shape[-1]), "words", title)
    return Panel(values, asking, answering, "pairs", title)


def sentences(steps: Steps, words: Sequence[str], query: int = -1, sources: Sequence[str] = ()) -> dict[str, str]:
    """Describe what happened to one query at each step: one sentence per step, by its name.

    Shapes: steps (q, k) or (h, q, k), context (q, e) or (h, q, e), one word per query; `sources` are the words of the keys
    where they differ.
    """
    sides = Sides(words, sources or words)
    query = range(len(words))[query]
    heads = [Steps(*(part[head] for _, part in steps.items())) for head in range(len(steps.scores))]
    parts = [steps] if steps.scores.dim() == 2 else heads
    told = {name: of_heads([say(part, sides, query) for part in parts]) for name, say in TOLD.items()}
    shared = {name: say(parts[0], sides, query) for name, say in SHARED.items()}
    return told | shared


def of_heads(parts: Sequence[str]) -> str:
    """Join the sentences of all heads into one, of the first four where there are more."""
    if len(parts) == 1:
        return capital(parts[0])
    told = "; ".join(f"head {head}: {part.rstrip('.')}" for head, part in enumerate(parts[:4], 1))
    return capital(told + ("; and so on." if len(parts) > 4 else "."))


def capital(text: str) -> str:
    """Capitalize a sentence that starts with one of our own words; a word of the text stays as written."""
    return text[0].upper() + text[1:] if text.startswith(("head ", "every ", "with ")) else text


def scores_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe which key matches best, and which least."""
    row, asks, name = steps.scores[query], names(sides.asking)(query), names(sides.answering)
    if len(row) == 1:
        return f"{asks} is matched with {name(0) if sides.apart else 'itself'} alone ({rough(row[0])})."
    best, least = int(row.argmax()), int(row.argmin())
    if row[best] == row[least]:
        return f"{sides.asking[query]} matches every word alike ({rough(row[best])})."
    return f"{asks} matches {name(best)} best ({rough(row[best])}), {name(least)} least ({rough(row[least])})."


def scaled_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe that the order of the scores stays and how their spread changes."""
    before, after = (float(row[query].max() - row[query].min()) for row in (steps.scores, steps.scaled))
    asks = names(sides.asking)(query)
    return (
        f"The order stays, the differences change: the scores of {asks} now lie {rough(after)} apart at most, "
        f"before {rough(before)}."
    )


def capped_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe how much the softcap reduced the largest score."""
    return f"No score can pass the cap: the largest, {rough(steps.scaled.max())}, became {rough(steps.capped.max())}."


def masked_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe how many keys the query may see."""
    hidden = steps.masked == -torch.inf
    seen, asks = int((~hidden[query]).sum()), names(sides.asking)(query)
    return f"{asks} may see {seen} of {hidden.shape[1]} words; {int(hidden.sum())} of {hidden.numel()} pairs are hidden."


def weights_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe which of the visible keys the query attends to most and least."""
    asks, name = names(sides.asking)(query), names(sides.answering)
    row, visible = steps.weights[query], steps.masked[query] != -torch.inf
    if row.isnan().any():
        return f"the weights of {asks} are not numbers: its scores hold a NaN."
    if not visible.any():
        return f"{asks} may see nothing, so all its weights are 0."
    best = int(row.argmax())
    least = int(row.masked_fill(~visible, torch.inf).argmin())
    if int(visible.sum()) == 1:
        return f"{asks} attends to {name(best)} alone ({rough(row[best])})."
    if row[best] == row[least]:
        return f"{asks} attends to the {int(visible.sum())} words it sees alike ({rough(row[best])} each)."
    return f"{asks} attends most to {name(best)} ({rough(row[best])}), least to {name(least)} ({rough(row[least])})."


def dropped_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe how many weights were dropped, and by what factor the others grew."""
    held, kept = steps.weights > 0, steps.dropped > 0
    fallen = int((held & ~kept).sum())
    rest = f", those left are {rough((steps.dropped[kept] / steps.weights[kept]).mean())} times as large" if kept.any() else ""
    own, asks = int(kept[query].sum()), names(sides.asking)(query)
    return f"{fallen} of {int(held.sum())} weights fell to 0{rest}; {asks} keeps {own} of {int(held[query].sum())}."


def context_said(steps: Steps, sides: Sides, query: int) -> str:
    """Describe what the new vector of the query is mixed from."""
    asks, name, row = names(sides.asking)(query), names(sides.answering), steps.dropped[query]
    order = [int(key) for key in row.argsort(descending=True, stable=True) if row[key] > 0]
    if not order:
        return f"{asks} gathers nothing: its new vector is 0."
    mixed = " + ".join(f"{rough(row[key])} {name(key)}" for key in order[:3]) + (" + ..." if len(order) > 3 else "")
    vector = ", ".join(rough(number) for number in steps.context[query][:4]) + (", ..." if steps.context.shape[-1] > 4 else "")
    return f"{asks} {'gathers' if sides.apart else 'becomes'} {mixed} = ({vector})."


Said = Callable[[Steps, Sides, int], str]
TOLD: dict[str, Said] = {
    "scores": scores_said,
    "weights": weights_said,
    "dropped": dropped_said,
    "context": context_said,
}
SHARED: dict[str, Said] = {"scaled": scaled_said, "capped": capped_said, "masked": masked_said}  # one for all heads


def names(words: Sequence[str]) -> Callable[[int], str]:
    """Return a function that names the word at an index, with its position where the word occurs more than once."""

    def name(index: int) -> str:
        word = words[index] if len(words[index]) <= LONGEST else words[index][: LONGEST - 1] + "…"
        return word if words.count(words[index]) == 1 else f"{word} (word {index + 1})"

    return name
