"""effects: what each head does to a number, by ablation of one head at a time, and by one gradient for all of them."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, DataError
from regard.evaluation_mode import evaluate_mode
from regard.mechanism.arguments import (
    check_choice,
    check_instance,
    check_integer,
    check_path,
    check_sequence,
    describe_value,
)
from regard.observe.attention_changes import REPLACEMENTS, KnockOut, name_layer
from regard.observe.intervene import intervene
from regard.observe.record import record
from regard.observe.recording import Recording
from regard.observe.score_interval import QueryScores, Score, estimate_scores
from regard.observe.text_table import align_columns

Measure = Callable[[Any], Tensor]
Watch = Callable[[Iterable[Any], int], Iterable[Any]]
SHOWN = 10  # heads that are printed


@dataclass(frozen=True)
class HeadEffect:
    """By how much a number rises without a head: measured, and estimated from its gradient."""

    layer: int
    name: str
    head: int
    effect: Score
    estimate: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: layer, name, head, effect (mean, low, high, count) and estimate."""
        fields = {name: getattr(self, name) for name in ("layer", "name", "head", "estimate")}
        return {**fields, "effect": self.effect.to_dict()}


@dataclass(frozen=True)
class HeadEffects:
    """The effects of the heads of a model on a number, in the order of the model; `whole` is the number with all heads."""

    rows: tuple[HeadEffect, ...]
    whole: float
    by: str

    @property
    def correlation(self) -> float:
        """Pearson's correlation of the effects with their estimates; NaN for fewer than two heads, or if one is constant."""
        pairs = torch.tensor([(float(row.effect), row.estimate) for row in self.rows], dtype=torch.float64)
        return float(torch.corrcoef(pairs.T)[0, 1]) if len(pairs) > 1 else math.nan

    def sort_by_effect(self) -> "HeadEffects":
        """Return the same heads, those with the largest effects in size first, NaN last."""
        sizes = [(-math.inf if math.isnan(row.effect) else abs(row.effect)) for row in self.rows]
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        return HeadEffects(tuple(self.rows[n] for n in order), self.whole, self.by)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return plain values for JSON, one dict for each head."""
        return [row.to_dict() for row in self.rows]

    def to_grid(self) -> Tensor:
        """Return the effects by layer and head (layers, h), up to the last that was measured; NaN for heads that were not."""
        size = [1 + max((getattr(row, axis) for row in self.rows), default=-1) for axis in ("layer", "head")]
        grid = torch.full(size, math.nan, dtype=torch.float64)
        for row in self.rows:
            grid[row.layer, row.head] = float(row.effect)
        return grid

    def __iter__(self) -> Iterator[HeadEffect]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"HeadEffects({len(self)} head{'s' * (len(self) != 1)}, by={self.by!r}, on {self.whole:.4g})"

    def __str__(self) -> str:
        shown = self.sort_by_effect().rows[:SHOWN]
        cells = [
            (
                f"{row.layer}.{row.head}",
                f"{row.effect:+.4g}",
                "-" if math.isnan(row.effect.low) else f"{row.effect.low:+.4g} to {row.effect.high:+.4g}",
                f"{row.estimate:+.4g}",
            )
            for row in shown
        ]
        lines = align_columns(("head", "effect", "interval", "estimate"), cells, ("head",))
        more = f"{len(shown)} of {len(self)} heads, the largest effects first; rows and to_dicts() have all"
        return "\n".join(
            [
                *lines,
                *([more] if len(shown) < len(self) else []),
                f"effect: by how much the number, {self.whole:.4g}, rises without the head ({self.by})",
                f"estimate: from one gradient; correlation with the effects {self.correlation:.2f}",
            ]
        )


def effects(
    model: nn.Module,
    inputs: Any,
    measure: Measure,
    *,
    heads: str | Sequence[tuple[int, int]] = "all",
    by: str = "zero",
    source: Recording | None = None,
    path: str | Path | None = None,
    watch: Watch = lambda heads, count: heads,
) -> HeadEffects:
    """Measure by how much a number rises without each head of self-attention, one forward for each head.

    inputs is a tensor for the model, or a dict of its arguments; measure takes what the model returns and gives a
    number, or one (b,) for each row, such as a logit, a difference of two, or a loss. With several rows, the effect has a 95 %
    interval over them. heads is "all" or pairs (layer, head); by and source say what takes a head's place, as in
    regard.KnockOut. Beside each effect there is its estimate Σ g · (z' - z), with z the head's context, z' what replaces it and
    g the gradient of the number with respect to z, one backward for all heads (attribution patching, Nanda 2023; Syed et al.
    2023).

    With path, each effect is added to a file of JSON lines as it is known, and the same call continues where one ended. watch
    is called with the heads and their number, for a progress bar. The model's mode and parameters are left as they were.
    Raises ConfigError for a measure that gives no number or no gradient, DataError for a file of another call.
    """
    check_instance("model", model, nn.Module)
    check_choice("by", by, REPLACEMENTS)
    if not callable(measure) or not callable(watch):
        raise ConfigError(
            f"measure and watch must be functions, got {describe_value(watch if callable(measure) else measure)}."
        )
    file = None if path is None else Path(check_path("path", path))
    with evaluate_mode(model):
        with torch.enable_grad(), require_gradients(model), record(model, keep="values") as recording:
            numbers = check_numbers(measure(call_model(model, inputs)))
            total = numbers.sum()
        chosen = select_heads(recording, heads)
        exact = numbers.detach().double()
        estimates = estimate_effects(recording, total, len(exact), KnockOut(by=by, source=source))
        header = {"by": by, "numbers": [float(number) for number in exact.cpu()], "heads": [list(pair) for pair in chosen]}
        if source is not None:
            header["estimates"] = [estimates[layer][head] for layer, head in chosen]  # which tell one source from another
        known = {} if file is None else read_effects(file, header)
        rows, names = [], recording.layers()
        for layer, head in watch(chosen, len(chosen)):
            rise = known.get((layer, head))
            if rise is None:
                with torch.no_grad(), intervene(model, KnockOut(name_layer(names, layer), head, by=by, source=source)):
                    rise = check_numbers(measure(call_model(model, inputs)), len(exact)).double().cpu() - exact.cpu()
                if file is not None:
                    append_line(file, {"layer": layer, "head": head, "rise": rise.tolist()})
            (effect,) = estimate_scores(QueryScores(rise.view(-1, 1, 1), torch.ones(len(rise), 1, 1, dtype=torch.bool)))
            rows.append(HeadEffect(layer, names[layer], head, effect, estimates[layer][head]))
    return HeadEffects(tuple(rows), float(exact.mean()), by)


@contextmanager
def require_gradients(model: nn.Module) -> Iterator[None]:
    """Let the floating point parameters of a frozen model require gradients within the context, so that its graph is kept."""
    frozen = [one for one in model.parameters() if one.is_floating_point() and not one.requires_grad]
    for one in frozen:
        one.requires_grad_(True)
    try:
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a dict of arguments, or one argument."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def check_numbers(numbers: Any, count: int | None = None) -> Tensor:
    """Return what a measure gave as a vector (b,). Raises ConfigError if it is neither a number nor a vector of them."""
    if not isinstance(numbers, Tensor) or not numbers.is_floating_point() or numbers.dim() > 1 or not numbers.numel():
        raise ConfigError(
            f"measure must give a tensor of one number, or of one for each row (b,); got {describe_value(numbers)}."
        )
    if count is not None and numbers.numel() != count:
        raise ConfigError(f"measure gave {count} numbers with all heads and {numbers.numel()} without one.")
    return numbers.reshape(-1)


def select_heads(recording: Recording, heads: str | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the heads to ablate, as pairs of layer and head. Raises ConfigError for pairs that do not exist."""
    counts = [recording.map(layer).shape[1] for layer in range(len(recording.layers()))]
    if not counts:
        raise ConfigError("no self-attention with a softmax was recorded, so there is no head to leave out.")
    every = [(layer, head) for layer, count in enumerate(counts) for head in range(count)]
    if isinstance(heads, str):
        check_choice("heads", heads, ("all",))
        return every
    chosen = []
    for pair in check_sequence("heads", heads):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        layer, head = (check_integer("a layer or head of heads", one) for one in pair) if is_pair else (-1, -1)
        if (layer, head) not in every:
            raise ConfigError(
                f"heads must be 'all' or pairs (layer, head), of layers 0 to {len(counts) - 1}; got {describe_value(pair)}."
            )
        chosen.append((layer, head))
    return chosen


def estimate_effects(recording: Recording, total: Tensor, rows: int, knock_out: KnockOut) -> list[list[float]]:
    """Return Σ g · (z' - z) of every head, averaged over the rows, by layer and head; total is the sum of their numbers."""
    attribution = recording.attribute(total)
    found = []
    for number, name in enumerate(recording.layers()):
        gradients, contexts = attribution.gradients_and_contexts(number)
        visit = recording.last.find_visit(number, "self", None)[1]
        change = knock_out.make_replacement(contexts, name, number, visit) - contexts
        found.append(((gradients.double() * change.double()).sum((0, 2, 3)) / rows).tolist())
    return found


def read_effects(file: Path, header: dict[str, Any]) -> dict[tuple[int, int], Tensor]:
    """Return the effects of a file that a call with the same numbers wrote, and cut off a line that was not finished.

    A new file is begun where there is none. Raises DataError for a file of another call.
    """
    if not file.exists() or not file.stat().st_size:
        append_line(file, header)
        return {}
    data = file.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    try:
        first, *lines = [json.loads(line) for line in complete.splitlines()]
        found = {(line["layer"], line["head"]): torch.tensor(line["rise"], dtype=torch.float64) for line in lines}
        is_same = first == header
    except (ValueError, KeyError, TypeError):
        is_same = False
    if not is_same or any(len(rise) != len(header["numbers"]) for rise in found.values()):
        raise DataError(f"{file} is not of this call: numbers, heads or replacement differ. Choose another path, or delete it.")
    if len(complete) < len(data):
        with file.open("r+b") as opened:
            opened.truncate(len(complete))
    return found


def append_line(file: Path, line: dict[str, Any]) -> None:
    """Add a line of JSON to a file. Raises ConfigError where the file cannot be written."""
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
