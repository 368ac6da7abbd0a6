"""Changes of attention: heads knocked out, edges cut, a temperature, and contexts patched from another recording."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import ConfigError, OutOfRangeError
from regard.map.hiding_bias import find_hiding_bias
from regard.mechanism import attend, attention
from regard.mechanism.additive import additive_attention
from regard.mechanism.arguments import check_choice, check_instance, check_integer, check_number, check_sequence, describe_value
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.masks import Given
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.recorded_runs.run import IMPLICIT, KINDS, Run
from regard.observe.recorded_runs.token_positions import Places, locate_tokens, mark_positions
from regard.observe.recording import Recording

Layer = int | str | None
Heads = int | Sequence[int] | None
REPLACEMENTS = ("zero", "mean", "resample")
SETTINGS = ("scale", "softcap", "bias", "sinks", "offset")  # of a call, as of `attention`
RECORD_VALUES = "Record with regard.record(model, keep='values')."


@dataclass(frozen=True, eq=False, kw_only=True)
class Change:
    """A change of a layer's attention. layer is a number or a module's path, or None for all.

    A number is that of `recording.map(layer, kind=kind)` for the same forward: one visit of a module that runs several times. A
    path is the module with all its visits. A number that is another layer in another forward, or that a layer of the encoder
    has beside one of the decoder, is refused. kind="implicit" is attention whose weights are no softmax, as a recording has it:
    its heads are those of the map.
    """

    layer: Layer = None
    head: Heads = None
    kind: str = "self"
    can_change_parts: ClassVar[bool] = False  # whether a rank can change its heads of a call, whose others it does not have
    computes_context: ClassVar[bool] = False  # whether change_context computes a context, so that others change it afterwards

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, (*KINDS, IMPLICIT))
        if self.layer is not None and not isinstance(self.layer, str):
            check_integer("layer", self.layer, ", the path of a module, or None for all")
        for head in () if self.head is None or isinstance(self.head, int) else check_sequence("head", self.head):
            check_integer("head", head, " or None for all")

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        """Return the call that the kernel gets instead; the call itself if it does not change."""
        return call

    def compute_context(self, changed: AttentionCall, call: AttentionCall, name: str, number: int) -> Tensor | None:
        """Return the context (b, h, q, e) of a call that only this change has changed; None to compute it by `attention`."""
        return None

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        """Return the context (b, h, q, e) that the model gets instead."""
        return context

    def change_weights(self, weights: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        """Return the weights (b, h, q, k) that the caller asked for, after those of the changed call."""
        return weights

    def is_target(self, name: str, number: int | None, kind: str) -> bool:
        """Return whether the change applies to a layer."""
        return kind == self.kind and (self.layer is None or self.layer in (name, number))

    def find_heads(self, call: AttentionCall) -> list[int]:
        """Return the heads to change by their places in a call: of those that this rank computes, if ranks share a call."""
        part = call.rank_part
        if part is None:
            return self.resolve_heads(call.q.shape[1])
        places = {head: place for place, head in enumerate(part.heads)}
        return [places[head] for head in self.resolve_heads(part.head_count) if head in places]

    def resolve_heads(self, count: int) -> list[int]:
        """Return the heads to change, of `count`. Raises OutOfRangeError for a head that does not exist."""
        chosen = range(count) if self.head is None else [self.head] if isinstance(self.head, int) else self.head
        wrong = [head for head in chosen if not -count <= head < count]
        if wrong:
            raise OutOfRangeError(
                f"{type(self).__name__} has head {describe_value(wrong[0])}, but the heads are 0 to {count - 1}."
            )
        return [head % count for head in chosen]


@dataclass(frozen=True, eq=False)
class KnockOut(Change):
    """Replace the context of a head, so that it says nothing about this input.

    by: "zero", as if the head's part of the output projection were 0; "mean", the mean over the batch at each position (Wang
    et al. 2022); "resample", the context of the batch row before (Chan et al. 2022). The last two need several rows, or a
    source, a recording with values of other inputs: the mean is then over all its rows and queries, and row r is replaced at
    each position by row r of the source, which starts again at row 0 after its last. A source of several forwards, such as the
    batches of a corpus, has the rows of all of them, in order. Padding counts in a mean and stands in for tokens in a sample:
    rows should have one length.
    """

    can_change_parts = True
    layer: Layer = None
    head: Heads = None
    by: str = "zero"
    source: Recording | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("by", self.by, REPLACEMENTS)
        if self.source is not None:
            check_instance("source", self.source, Recording, RECORD_VALUES)
            if self.by == "zero":
                raise ConfigError("by='zero' takes nothing from a source: leave it out, or use by='mean' or 'resample'.")

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        chosen = torch.zeros(context.shape[1], dtype=torch.bool, device=context.device)
        chosen[self.find_heads(call)] = True
        if self.by != "zero" and self.source is None and call.rank_part is not None and not call.rank_part.has_whole_batch:
            raise ConfigError(
                f"by={self.by!r} replaces a head's context by that of other rows of the batch, but the DTensors of {name} are "
                "split along the batch: pass source=, a recording of other inputs on this rank."
            )
        if self.source is not None and self.by == "resample":
            refuse_steps(call, name)
        past = locate_tokens(call, self.kind).past if self.source is not None else 0
        return torch.where(chosen.view(-1, 1, 1), self.make_replacement(context, name, number, call.visit, past), context)

    def make_replacement(self, context: Tensor, name: str, number: int, visit: int | None, past: int = 0) -> Tensor:
        """Return what takes the place of the contexts (b, h, q, e) of a layer, in a shape that broadcasts to theirs.

        `visit` is that of the module in its forward; `past` tokens came before the contexts.
        """
        if self.by == "zero":
            return context.new_zeros(())
        if self.source is None:
            if len(context) < 2:
                raise ConfigError(
                    f"by={self.by!r} replaces a head's context by that of other rows: the batch needs at least 2, or pass "
                    "source=, a recording of other inputs."
                )
            return context.mean(0, keepdim=True) if self.by == "mean" else context.roll(1, 0)
        b, h, q, e = context.shape
        runs = find_runs(self.source, name, self.kind)
        others = [compute_recorded_context(run, name, number, self.kind, visit).to(context) for run in runs]
        for other in others:
            if other.shape[1] != h or other.shape[3] != e or (self.by == "resample" and other.shape[2] < past + q):
                after = f" after {past} tokens" if past else ""
                raise ConfigError(
                    f"the source of KnockOut recorded contexts (b, h, q, e) = {tuple(other.shape)} in {name}, which do not fit "
                    f"{tuple(context.shape)}{after}: record the same model on inputs that are at least as long."
                )
        if self.by == "mean":
            return torch.cat([other.transpose(1, 2).flatten(0, 1) for other in others]).mean(0).view(1, h, 1, e)
        rows = torch.cat([other[:, :, past : past + q] for other in others])
        return rows[torch.arange(b) % len(rows)]


@dataclass(frozen=True, eq=False)
class CutEdges(Change):
    """Hide some keys from some queries, both by position in the sequence; the queries' other weights grow accordingly.

    A query without any other key has weights 0. Negative positions count from the last token so far.
    """

    can_change_parts = True
    queries: Places = None  # all
    keys: Places = None

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        if self.queries is not None:
            refuse_steps(call, name)
        q, k, (past, first, total) = call.q.shape[2], call.k.shape[2], locate_tokens(call, self.kind)
        rows = mark_positions(self.queries, past + q, "queries")[past:].view(1, 1, -1, 1)
        columns = functional.pad(mark_positions(self.keys, total, "keys")[first:], (0, k - (total - first))).view(1, 1, 1, -1)
        heads = torch.zeros(1, call.q.shape[1], 1, 1, dtype=torch.bool)
        heads[:, self.find_heads(call)] = True
        cut = [Given(x.to(call.q.device)) for x in (rows, columns, heads)]
        hidden = cut[0] & cut[1] if self.head is None else cut[0] & cut[1] & cut[2]
        return replace(call, mask=call.mask & ~hidden & hide_by_bias(call))


@dataclass(frozen=True, eq=False)
class Temperature(Change):
    """Divide the scaled scores of a head by t, before softcap, bias and sinks: t > 1 flattens its weights."""

    can_change_parts = True
    layer: Layer = None
    head: Heads = None
    t: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < check_number("t", self.t) < math.inf:
            raise ConfigError(f"t must be above 0 and finite, got {self.t}.")

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        if call.weight is not None:
            return self.change_additive_call(call)
        by = torch.ones(call.q.shape[1], dtype=call.q.dtype, device=call.q.device)
        by[self.find_heads(call)] = self.t
        return replace(call, q=call.q / by.view(-1, 1, 1))

    def change_additive_call(self, call: AttentionCall) -> AttentionCall:
        """Return a call with additive scores, its weight divided by t. Raises ConfigError for some heads only."""
        assert call.weight is not None
        count = call.q.shape[1]
        if len(set(self.resolve_heads(count))) < count:
            raise ConfigError("the heads of additive attention share one weight: use Temperature for all of them, head=None.")
        return replace(call, weight=call.weight / self.t)


def refuse_steps(call: AttentionCall, name: str) -> None:
    """Raise ConfigError if a call is a step of a decoder, whose place in the sequence is not known."""
    if call.is_stepwise and call.q.shape[2] == 1:
        raise ConfigError(
            f"{name} attends once for each step of a decoder, and the position of a step is not known: leave queries out, or "
            "use by='zero' or 'mean'."
        )


def name_layer(names: Sequence[str], number: int) -> int | str:
    """Return what a change takes as a layer, given the modules of all layers: its path, or its number where layers share it."""
    return names[number] if names.count(names[number]) == 1 else number


def find_runs(recording: Recording, name: str, kind: str) -> list[Run]:
    """Return the runs of a recording that have a layer by its path, or if none has, those with the layers of the last run."""
    named = [run for run in recording.runs if has_layer(run, name, kind)]
    layers = recording.layers(kind)  # of the last run
    return named or [run for run in recording.runs if run.layers(kind) == layers]


def has_layer(run: Run, name: str, kind: str) -> bool:
    """Return whether a run has a layer by its path, in whichever part of the model."""
    return bool(run.list_named_visits(name, kind, None))


def find_recorded_layer(run: Run, name: str, number: int, kind: str, visit: int | None) -> int | str:
    """Return the layer of a module and its visit if the run has it, else that of its number.

    Raises ConfigError where that number is another layer of the run, which has some layers only, or has other visits.
    """
    names, visits = run.layers(kind), [visit for _, visit in run.list_named_visits(name, kind, None)]
    if visits and visit is not None and visit not in visits:
        runs = " and ".join(map(str, visits))
        raise ConfigError(f"the recording has run {runs} of {name}, not run {visit}: record all layers.")
    numbered = run.list_visits(kind, None)
    if visits:
        return name if visit is None or (name, visit) not in numbered else numbered.index((name, visit))
    if number >= len(names):
        return number
    paths = [re.split(r"(\d+)", path)[::-1] for path in (name, names[number])]
    pairs = list(zip(*paths, strict=False))  # from the end: names, numbers between them
    texts, numbers = pairs[:-1:2], pairs[1::2]
    if all(one == other for one, other in texts) and any(one != other for one, other in numbers):
        raise ConfigError(f"the recording has no {name}, only {', '.join(names)}: record all layers, or choose one of these.")
    return number


def compute_recorded_context(run: Run, name: str, number: int, kind: str, visit: int | None) -> Tensor:
    """Compute the contexts (b, h, q, e) of a recorded layer, weights times values. Raises ConfigError without values."""
    layer = find_recorded_layer(run, name, number, kind, visit)
    values = run.values(layer, kind=kind)
    if values is None:
        raise ConfigError(f"the values of {name} were not kept. {RECORD_VALUES}")
    return run.map(layer, kind=kind) @ values


def hide_by_bias(call: AttentionCall) -> Mask:
    """Return a mask of the keys that finite numbers of a call's bias hide, such as -1e9, of each query that sees others.

    Where those others are hidden too, the softmax would spread its weights over the keys of such numbers.
    """
    request = call.build_map(call.k, mask=EVERYTHING).planes.request
    hiding = find_hiding_bias(request)
    if request.bias is None or hiding == -math.inf:
        return EVERYTHING
    hidden = request.bias <= hiding
    return ~Given(hidden & ~hidden.all(-1, keepdim=True))


def compute_context(call: AttentionCall) -> Tensor:
    """Compute the context of a changed call, in the dtype of its values; a model may have its queries and keys in another."""
    assert call.v is not None
    q, k, v = promote_tensors(call)
    if call.weight is not None:
        return additive_attention(q, k, v, call.weight, call.mask, offset=call.offset).to(call.v.dtype)
    settings = {name: getattr(call, name) for name in SETTINGS}
    return attention(q, k, v, call.mask, **settings, dropout=call.dropout).to(call.v.dtype)


def compute_weights(call: AttentionCall) -> Tensor:
    """Compute the weights (b, h, q, k) of a changed call, on all keys that its kernel was given."""
    weights = attend(*promote_tensors(call), call.mask, **{name: getattr(call, name) for name in SETTINGS}).weights
    return functional.pad(weights, (0, call.unwritten_keys))


def promote_tensors(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a call in one dtype."""
    assert call.v is not None
    dtype = reduce(torch.promote_types, (call.q.dtype, call.k.dtype, call.v.dtype))
    return call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)
