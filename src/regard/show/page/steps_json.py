"""STEPS, the data of the Steps view: q, k, v and the mask of one head, or of one of the lectures' examples, as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.lectures.example_steps import Example, ExampleStep, StepTable
from regard.lectures.examples import build_example
from regard.mechanism import Steps
from regard.observe.head_table import quote_word
from regard.observe.map_view import MapView
from regard.show.number_format import format_rounded
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, truncate_word

MAX_ROW_KEYS = 24  # keys of the single row that is shown of a long text


def compute_head_steps(entry: RecordingEntry, place: HeadPlace, q: int | None, most: int) -> dict[str, Any]:
    """Return the STEPS of a head: of all its queries and keys if at most `most`, else of query q with its largest keys.

    Raises ConfigError where there is no such query, DataError where a number is not finite.
    """
    view = MapView(entry.get_map(place))
    plane = view.get_plane(0, 0)
    queries, keys = plane.shape
    last = queries - 1
    if q is not None and not 0 <= q <= last:
        raise ConfigError(f"q must be at least 0 and at most {last:,}, got {q}.")
    rows, columns = entry.get_axis_words(place)
    focus = last if q is None else q
    if max(queries, keys) > most:
        return compute_row_steps(entry, place, view, focus, rows[focus], columns)
    problem = collect_arguments(view, torch.arange(queries), torch.arange(keys), entry.get_values(place))
    return describe_head(entry, place, rows, columns, focus) | problem


def compute_row_steps(
    entry: RecordingEntry, place: HeadPlace, view: MapView, q: int, asks: str, columns: Sequence[str]
) -> dict[str, Any]:
    """Return the STEPS of one query with the keys it attends to most; the exponentials of all others are in the sink."""
    plane = view.get_plane(0, 0)
    query, everywhere = torch.tensor([q]), torch.arange(plane.shape[1])
    (row,) = plane.compute_masked_scores(query, everywhere)
    count = min(MAX_ROW_KEYS, int((row != -torch.inf).sum()))
    largest = row.topk(max(count, 1)).indices.sort().values
    rest = row.clone()
    rest[largest] = -torch.inf
    others = torch.cat((rest, row.new_empty(0) if plane.sink is None else plane.sink.view(1))).logsumexp(0)
    share = float((others - torch.logaddexp(others, row[largest].logsumexp(0))).exp()) if count else 0.0
    note = (
        f"Of {len(columns):,} tokens, {quote_word(truncate_word(asks))} attends most to these {len(largest)}; all "
        f"others together receive {format_rounded(share)} of its attention. The context is computed from these alone."
    )
    found = describe_head(entry, place, [asks], [columns[key] for key in largest.tolist()], 0)
    found |= collect_arguments(view, query, largest, entry.get_values(place))
    return found | {"sink": convert_score(others), "partial": True, "places": largest.tolist(), "notes": [note]}


def describe_head(
    entry: RecordingEntry, place: HeadPlace, rows: Sequence[str], columns: Sequence[str], focus: int
) -> dict[str, Any]:
    """Return the texts of the STEPS of a head."""
    return {
        "title": f"layer {place.layer}, head {entry.get_head_number(place)}",
        "source": None,
        "notes": [],
        "rows": [truncate_word(word) for word in rows],
        "columns": [truncate_word(word) for word in columns],
        "focus": focus,
    }


def collect_arguments(view: MapView, queries: Tensor, keys: Tensor, values: Tensor | None) -> dict[str, Any]:
    """Return the numbers of STEPS: the arguments of attend for these queries and keys.

    A key that a finite number in the bias hides is not visible, except to a query of which all keys are hidden in this way:
    that one has weights all the same.
    """
    plane = view.get_plane(0, 0)
    bias = None if plane.bias is None else plane.bias[queries.unsqueeze(-1), keys]
    visible = plane.can_see(queries.unsqueeze(-1), keys).expand(len(queries), len(keys))
    if bias is not None:
        visible = visible & (bias != -torch.inf)
        shown = visible & ~(bias <= view.hiding_bias)
        visible = torch.where(shown.any(-1, keepdim=True), shown, visible)
        bias = bias.masked_fill(~visible, 0)
    return {
        "q": convert_numbers("q", plane.q[queries]),
        "k": convert_numbers("k", plane.k[keys]),
        "v": None if values is None else convert_numbers("v", values[keys]),
        "weight": None if plane.weight is None else convert_numbers("weight", plane.weight),
        "scores": None
        if plane.weight is None
        else convert_numbers("scores", plane.compute_scores(plane.q[queries], plane.k[keys])),
        "scale": plane.request.scale,
        "softcap": plane.request.softcap,
        "bias": None if bias is None else convert_numbers("bias", bias),
        "sink": None if plane.sink is None else convert_score(plane.sink),
        "visible": visible.tolist(),
    }


def get_example_steps(name: str, head: int = 0) -> dict[str, Any]:
    """Return the STEPS of one of the lectures' examples, for one of its heads, with what comes before and after them.

    Raises ConfigError where there is no such head.
    """
    found = build_example(name)
    several = found.steps is not None and found.steps.scores.dim() == 3
    heads = len(found.steps.scores) if found.steps is not None and several else 1
    if not 0 <= head < heads:
        raise ConfigError(f"head must be at least 0 and below {heads}, got {head}.")
    answer = {
        "title": found.title,
        "source": found.source,
        "notes": list(found.notes),
        "rows": list(found.words) if found.steps is not None else [],
        "columns": list(found.words) if found.steps is not None else [],
        "focus": found.focus,
        "formulas": dict(found.formulas),
        "sentences": dict(found.sentences),
        "before": [convert_step(one) for one in found.before],
        "after": [convert_step(one) for one in found.after],
        "head": head,
        "heads": heads,
    }
    return answer | (
        make_empty_arguments()
        if found.steps is None
        else collect_example_arguments(found, found.steps, head if several else None)
    )


def make_empty_arguments() -> dict[str, Any]:
    """Return the numbers of STEPS for an example without attention."""
    return dict.fromkeys(("q", "k", "v", "scores", "softcap", "bias", "sink", "visible")) | {"scale": 1.0}


def collect_example_arguments(found: Example, steps: Steps, head: int | None) -> dict[str, Any]:
    """Return the numbers of the STEPS of an example, for one of its heads where it has several."""
    steps = steps if head is None else Steps(*(part[head] for _, part in steps.items()))
    q, k, v = (part if part is None or head is None else part[head] for part in (found.q, found.k, found.v))
    leaky = found.right is not None  # its mask writes 0 where -inf belongs
    masked = steps.masked if found.right is None else found.right.masked
    dropped = not torch.equal(steps.weights, steps.dropped)
    given = q is None or k is None or found.weight is not None  # scores that are not q kᵀ
    return {
        "q": None if q is None else convert_numbers("q", q),
        "k": None if k is None else convert_numbers("k", k),
        "v": None if v is None else convert_numbers("v", v),
        "weight": None if found.weight is None else convert_numbers("weight", found.weight),
        "scores": convert_numbers("scores", steps.scores) if given else None,
        "scale": found.scale,
        "softcap": None,
        "bias": None,
        "sink": None,
        "visible": (masked != -torch.inf).tolist(),
        "hidden": 0.0 if leaky else None,
        "dropout": convert_numbers("dropout", (steps.dropped / steps.weights).nan_to_num(0)) if dropped else None,
    }


def convert_step(one: ExampleStep) -> dict[str, Any]:
    """Convert an `ExampleStep` to JSON."""
    return {
        "name": one.name,
        "formula": one.formula,
        "sentence": one.sentence,
        "panels": [convert_panel(each) for each in one.panels],
        "lines": [{"label": line.label, "calculation": line.calculation} for line in one.lines],
    }


def convert_panel(one: StepTable) -> dict[str, Any]:
    """Convert a table to JSON; a number that JSON cannot hold is a string, as in regard walk --json."""
    values = [[number if math.isfinite(number) else str(number) for number in row] for row in one.numbers]
    return {"title": one.title, "rows": list(one.rows), "columns": list(one.columns), "axes": one.axes, "values": values}


def convert_numbers(name: str, values: Tensor) -> Any:
    """Convert numbers to lists. Raises DataError where one is not finite, which JSON cannot hold."""
    if not values.isfinite().all():
        raise DataError(
            f"{name} of this head contains numbers that are not finite, so its steps cannot be drawn. View its map instead."
        )
    return values.detach().tolist()


def convert_score(value: Tensor) -> float | None:
    """Return a score as a number, or None where it is -inf and takes nothing."""
    return float(value) if value.isfinite() else None
