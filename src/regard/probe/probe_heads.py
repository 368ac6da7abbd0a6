"""probe_heads: what each head of a model does on repeated random tokens, how sure that is, and what is lost without it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attribution.activation_trace import ActivationTrace
from regard.attribution.model_parts import (
    LayerParts,
    ModelParts,
    check_unembedding,
    find_embedding,
    find_parts,
    trace_forward,
)
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits, sees_ahead
from regard.mechanism.arguments import check_choice, check_instance, describe_value
from regard.observe.attention_changes import REPLACEMENTS, KnockOut, name_layer
from regard.observe.classification.head_classification import classify_heads
from regard.observe.classification.head_kinds import EFFECT, PREFIX_MATCHING, RULES, TEXT_EFFECT, THRESHOLDS, infer_kind
from regard.observe.classification.head_scores import HeadOptions
from regard.observe.head_table import Head, Heads
from regard.observe.intervene import intervene
from regard.observe.map_view import MapView
from regard.observe.recording import Recording
from regard.observe.score_interval import QueryScores, Score, estimate_scores
from regard.probe.copying import score_copying, score_ov_eigenvalues
from regard.probe.repeated_tokens import LENGTH, REPEATS, SEEDS, Probe, make_probe_of_model

ABLATED_HEADS = ("patterns", "all", "none")
PATTERN_KINDS = tuple(kind for kind in THRESHOLDS if kind != "first token")
FIRST_COLUMNS = (*PATTERN_KINDS, "copying", "ov", "first token", "sink", EFFECT, TEXT_EFFECT)


def probe_heads(
    model: nn.Module,
    *,
    vocabulary: int | None = None,
    begin: int | None = None,
    context: int | None = None,
    seeds: int = SEEDS,
    length: int = LENGTH,
    repeats: int = REPEATS,
    ablate: str = "patterns",
    by: str = "mean",
    unembedding: Tensor | None = None,
    text: Tensor | None = None,
    watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda rows, count: rows,
) -> Heads:
    """Classify each head of a language model on repeated random tokens: return the table of `regard.heads`, with more scores.

    The probe has `seeds` rows: the model's begin token, `length` random tokens of its vocabulary, and the same tokens again,
    `repeats` times in all, within its context; vocabulary, begin and context are read from the model's config unless given. The
    scores are means over the later copies, where every pattern can occur, and the intervals are over the seeds. There are those
    of `regard.heads`, of which "induction" is here the prefix matching score of Olsson et al. 2022, and:

    - "copying": by how many logits the head raises the tokens it attends to over other tokens, by the direct path through the
      output projection and the last norm (`regard.probe.copying.score_copying`);
    - "ov": the eigenvalue score of the head's OV circuit, from -1 to 1 (Elhage et al. 2021); one number, without an interval;
    - "effect": by how many nats the loss on the repeated tokens rises without the head. by says what replaces it, "zero",
      "mean" or "resample" (`regard.KnockOut`); ablate says for which heads, "patterns" (those that a pattern names), "all" or
      "none". Each head takes one forward.
    - "effect on text": the same on `text`, tokens (b, t) of b documents, if it is given; the interval is over the documents.

    An induction head needs both prefix matching above 0.4 and copying above 0; a head that matches prefixes and is not known to
    copy is of the kind "prefix matching". `unembedding` (n, c) is needed only where the
    model has no get_output_embeddings. `watch` is called with the heads to ablate and their number, for a progress bar.
    Raises ConfigError if the model cannot be probed.
    """
    settings = ProbeSettings(vocabulary, begin, context, seeds, length, repeats, ablate, by, unembedding, text, watch)
    *_, table = iterate_probe(model, settings)
    assert isinstance(table, Heads)
    return table


@dataclass(frozen=True, eq=False)
class ProbeSettings:
    """The arguments of `probe_heads` besides the model."""

    vocabulary: int | None = None
    begin: int | None = None
    context: int | None = None
    seeds: int = SEEDS
    length: int = LENGTH
    repeats: int = REPEATS
    ablate: str = "patterns"
    by: str = "mean"
    unembedding: Tensor | None = None
    text: Tensor | None = None
    watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda rows, count: rows


class ProbeProgress(NamedTuple):
    """How many heads are scored or taken out, of how many."""

    what: str
    done: int
    of: int


def iterate_probe(model: nn.Module, settings: ProbeSettings) -> Iterator[ProbeProgress | Heads]:
    """Yield the progress of `probe_heads`, then its table; between two items nothing runs the model."""
    ablate, by, unembedding, text, watch = (
        getattr(settings, name) for name in ("ablate", "by", "unembedding", "text", "watch")
    )
    check_instance("model", model, nn.Module, "Pass a language model that maps tokens (b, t) to logits.")
    check_choice("ablate", ablate, ABLATED_HEADS)
    check_choice("by", by, REPLACEMENTS)
    if not callable(watch):
        raise ConfigError(f"watch must be a function of the heads and their number, got {describe_value(watch)}.")
    check_unembedding(unembedding)
    given = {name: getattr(settings, name) for name in ("seeds", "length", "repeats")}
    given |= {name: value for name in ("begin", "context") if (value := getattr(settings, name)) is not None}
    size = find_vocabulary(model, unembedding) if settings.vocabulary is None else settings.vocabulary
    probe = make_probe_of_model(model, size, **given)
    tokens = probe.tokens.to(next(model.parameters(), torch.empty(0)).device)
    with evaluate_mode(model), torch.no_grad():
        trace, recording, logits = trace_forward(model, tokens)
        if ablate != "none" and sees_ahead(model, tokens, logits):
            raise ConfigError(
                "the logits change with later tokens, so what the model predicts of the next one, and the effect of a head on "
                "it, say nothing. Pass ablate='none', or a model that sees the tokens before alone."
            )
        parts, notes = try_to_find_parts(model, trace, recording, logits, unembedding)
        rows, count = [], sum(map(len, map(recording.heads, range(len(recording.layers())))))
        for row in add_circuits(recording, probe, parts):
            rows.append(row)
            yield ProbeProgress("scored", len(rows), count)
        chosen = [
            row for row in rows if ablate == "all" or (ablate == "patterns" and RULES.get(row.kind, row.kind) in PATTERN_KINDS)
        ]
        targets = [AblationTarget(EFFECT, tokens, probe.repeated, compute_losses(logits, tokens, probe.repeated))]
        if text is not None:
            targets.append(make_text_target(model, check_text(text).to(tokens.device)))
        measured, layers = [target.name for target in targets] if chosen else [], recording.layers()
        effects: dict[tuple[int, int], dict[str, Score]] = {}
        for row in watch(chosen, len(chosen)):
            effects[row.layer, row.head] = {target.name: measure_effect(model, row, by, target, layers) for target in targets}
            yield ProbeProgress("taken out", len(effects), len(chosen))
    rows = [
        replace(row, scores=order_scores({**row.scores, **effects.get((row.layer, row.head), {})}, measured)) for row in rows
    ]
    if not rows:
        notes = (*notes, "no layer has a softmax, and so no head has a row.")
    yield Heads(tuple(rows), (describe_probe(probe), *notes))


def find_vocabulary(model: nn.Module, unembedding: Tensor | None) -> int:
    """Return the number of tokens of a model. Raises ConfigError if it is not known."""
    config = getattr(model, "config", None)
    for name in ("vocab_size", "vocabulary"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    found = unembedding if unembedding is not None else find_embedding(model, "get_output_embeddings", "head")
    if found is None:
        raise ConfigError("the size of the model's vocabulary was not found: pass vocabulary=, the number of its tokens.")
    return len(found)


def try_to_find_parts(
    model: nn.Module, trace: ActivationTrace, recording: Recording, logits: Tensor, unembedding: Tensor | None
) -> tuple[ModelParts | None, tuple[str, ...]]:
    """Return the parts of a model, or None and a note that says why copying cannot be computed.

    Raises ConfigError if the unembedding was given and does not fit.
    """
    try:
        parts = find_parts(model, trace, recording, logits, unembedding)
    except ConfigError as error:
        if unembedding is not None:
            raise
        return None, (f"without copying: {error}",)
    missing = sum(part.output is None for part in parts.layers.values())
    note = f"without copying in {missing} of {len(parts.layers)} layers: their output projection was not found."
    return parts, (note,) if missing else ()


def add_circuits(recording: Recording, probe: Probe, parts: ModelParts | None) -> Iterator[Head]:
    """Yield the rows of `regard.heads` on the probe with the scores of copying, by which induction heads are then named."""
    options = HeadOptions(probe.tokens, classes={}, queries=probe.later_copies)
    for number, name in enumerate(recording.layers()):
        layer = LayerParts(None, None, None) if parts is None else parts.layers[name]
        values, copying, circuits = recording.values(number), [Score(float("nan"))], [Score(float("nan"))]
        if parts is not None and layer.output is not None and values is not None:
            copying = estimate_scores(
                score_copying(MapView(recording.map(number), queries=probe.later_copies), values, layer, parts, probe.tokens)
            )
            if layer.value is not None and parts.embedding is not None:
                circuits = [Score(x, x, x) for x in score_ov_eigenvalues(layer, parts).tolist()]
        for row in classify_heads(recording, options, layers=[number]):
            scores = dict(row.scores)
            if parts is not None and layer.output is not None:
                scores |= {"copying": copying[row.head], "ov": circuits[min(row.head, len(circuits) - 1)]}
                kind = infer_kind(scores) if row.kind == PREFIX_MATCHING else row.kind  # an induction head copies, too
                row = replace(row, scores=scores, kind=kind)
            yield row


@dataclass(frozen=True, eq=False)
class AblationTarget:
    """Tokens (b, t) on which the effect of a head is measured: the queries that count, and their losses with all heads."""

    name: str
    tokens: Tensor
    queries: slice
    losses: Tensor


def make_text_target(model: nn.Module, tokens: Tensor) -> AblationTarget:
    """Return the target of documents (b, t), all of whose queries but the last count."""
    every = slice(0, tokens.shape[1] - 1)
    return AblationTarget(TEXT_EFFECT, tokens, every, compute_losses(compute_logits(model, tokens), tokens, every))


def check_text(text: Tensor) -> Tensor:
    """Return the tokens (b, t) of documents. Raises ConfigError."""
    is_ids = isinstance(text, Tensor) and text.dim() == 2 and not text.is_floating_point() and not text.is_complex()
    if not is_ids or text.shape[0] < 1 or text.shape[1] < 2:
        raise ConfigError(f"text must be tokens (b, t) of documents, at least two of each; got {describe_value(text)}.")
    return text


def compute_losses(logits: Tensor, tokens: Tensor, queries: slice) -> Tensor:
    """Return the loss of the token after each query, in nats, (b, q)."""
    following = tokens[:, queries.start + 1 : queries.stop + 1].cpu()
    return F.cross_entropy(logits[:, queries].float().cpu().transpose(1, 2), following, reduction="none")


def measure_effect(model: nn.Module, row: Head, by: str, target: AblationTarget, names: Sequence[str]) -> Score:
    """Return by how much the loss rises without a head, with its interval over the rows of the tokens.

    names are the modules of all layers.
    """
    with intervene(model, KnockOut(name_layer(names, row.layer), row.head, by)):
        losses = compute_losses(compute_logits(model, target.tokens), target.tokens, target.queries)
    rise = (losses - target.losses).unsqueeze(1)
    return estimate_scores(QueryScores(rise, torch.ones_like(rise, dtype=torch.bool)))[0]


def order_scores(scores: dict[str, Score], measured: Sequence[str]) -> dict[str, Score]:
    """Return the scores in the order of the columns; NaN for the measured effects of a head that was not ablated."""
    found = {**dict.fromkeys(measured, Score(float("nan"))), **scores}
    return {name: found[name] for name in (*FIRST_COLUMNS, *found) if name in found}


def describe_probe(probe: Probe) -> str:
    """Return a sentence on the probe."""
    b, t = probe.tokens.shape
    begin = "the begin token, " if probe.begin else "no begin token, "
    return (
        f"{b} seeds of {t} tokens: {begin}{probe.length} random tokens, {(t - probe.begin) // probe.length} times. Intervals: "
        "95 %, over the seeds."
    )
