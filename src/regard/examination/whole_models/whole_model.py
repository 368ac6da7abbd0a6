"""Examine a whole model of token ids: each layer's recorded attention, and which token moves which output."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.examination import suggestions
from regard.examination.call_checks import all_checks, scale_checks
from regard.examination.call_checks.head_checks import mixes_tokens
from regard.examination.call_reading import bucket_reading, log_scale, matrix_checks, table_reading
from regard.examination.call_reading.inner_calls import InnerCall, record_inner_calls
from regard.examination.mask_requirements import make_later_table
from regard.examination.probes.inference import check_inference
from regard.examination.probes.raises import report_refusal
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Checked, Finding, Report, Unknown, Visibility
from regard.examination.subject import localize
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.inplace_writes import watch_writes
from regard.examination.subject.routing import record_routing
from regard.examination.subject.token_model import (
    BATCH,
    TOKENS,
    TokenModel,
    find_outputs,
    make_token_model,
    use_evaluation_mode,
)
from regard.examination.time_limit import UNLIMITED, TimeLimit
from regard.examination.whole_models import batch_places, cached_decoding, layer_dropout, model_lengths, model_positions, replay
from regard.examination.whole_models.output_moves import (
    TRIED,
    OutputMoves,
    compute_closure,
    has_tokens_first,
    make_visibility,
    measure_moves,
    replace_token,
)
from regard.examination.whole_models.recorded_layers import (
    LayerWeights,
    RecordedLayers,
    describe_missed,
    format_layer_count,
    is_full_or_window,
    record_layers,
)
from regard.mechanism import Mask
from regard.mechanism.mask_algebra import Offset

FORWARDS = TOKENS + 26  # about as many as an examination takes, for a progress bar
HIDE = "Apply the expected mask in that layer, before its softmax: scores.masked_fill(~mask, -torch.inf), or is_causal=True."
NEXT = "In that layer the diagonal is off by one: triu(diagonal=1) hides the later tokens. "
SHOW = "Hide no more than the expected mask does: in that layer set only the scores of keys that it hides to -inf."
MIX = "Keep tokens and sequences separate in that module: norms over the last axis only, no mean, view or shift over tokens."
ATTEND = (
    f"If that module is attention: {HIDE[0].lower()}{HIDE[1:].replace('that layer', 'it')} If not, keep tokens separate in it."
)
TURNED = "If it is intended to take ids (t, b): examine(lambda ids: model(ids.T).transpose(0, 1), sample=ids)."
NONE = "a model that contains attention, with weights other than 0"
DRAW = "Apply dropout in training only: nn.Dropout, or F.dropout(x, p, training=self.training)."
LOAD = "Load or train these weights again: NaN or inf in them reaches every output."
BLIND = "Fix that module. If it is attention, let each query see at least its own key: softmax over only -inf is NaN."
EACH = "the logits of every token: examine(lambda ids: model(ids, ids)[0], sample=ids), if it returns them only with targets"
BOTH = "only the decoder's ids: examine(lambda ids: model(sources, ids), sample=ids)"


def is_model(subject: object, sample: Any = None) -> bool:
    """Return whether a subject is a whole model, which takes token ids: those of the sample, or ids found by trial."""
    with use_evaluation_mode(subject):
        return make_token_model(subject, sample) is not None


def examine_model(
    subject: object,
    *,
    expects: Mask,
    sample: Any = None,
    scale: float | None = None,
    offset: Offset = 0,
    progress: ExaminationProgress | None = None,
    limit: TimeLimit = UNLIMITED,
) -> Report | None:
    """Examine who sees whom in each layer and from end to end, for a model in evaluation; None if a subject takes no token ids.

    A finding in a layer's recorded attention names that layer; one outside of attention names the first module whose output
    moves although its inputs do not. The scale, the heads and the roles of each layer are those of the calls that it really
    makes. Raises ConfigError for a sample of ids that is not (b, t) or (t,), and for a model that raises for all ids tried.
    """
    progress = progress or ExaminationProgress()
    with use_evaluation_mode(subject), watch_writes(subject) as writes, limit.enforce():
        model = make_token_model(subject, sample)
        if model is None:
            return None
        model = replace(model, writes=writes, ids=model.ids if expects.is_batch_specific else model.ids[:BATCH])
        progress.begin_step("layers")
        results: list[Finding | Checked | Unknown | Visibility] = []
        for one in itertools.chain(collect_model_results(model, expects, offset, scale), writes.report_changes()):
            results.append(one)
            progress.add([one] if not isinstance(one, Visibility) else [])
    findings = tuple(one for one in results if isinstance(one, Finding))
    checked = tuple(one for one in results if isinstance(one, Checked))
    unknown = tuple(one for one in results if isinstance(one, Unknown))
    picture = next((one for one in results if isinstance(one, Visibility)), None)
    return Report(model.name, str(expects), findings, checked, unknown, (describe_call(model),), picture)


def list_attention_layers(subject: object, sample: Any = None) -> list[str]:
    """Return the names of the modules that attend in a model of token ids, in order; empty for anything else."""
    with use_evaluation_mode(subject):
        model = make_token_model(subject, sample)
        if model is None:
            return []
        try:
            recorded = record_inner_calls(model.module, model.run)
        except (SubjectError, RegardError):  # the report on it says so
            return []
    names = [*(one.name for one in recorded.calls), *(one.module for one in recorded.missed)]
    return [name for name in dict.fromkeys(names) if name]


def collect_model_results(
    model: TokenModel, expects: Mask, offset: Offset, scale: float | None
) -> Iterator[Finding | Checked | Unknown | Visibility]:
    """Yield the results for a model; if it raises, the last is what cannot be determined."""
    found = False
    try:
        for one in ModelExamination(model, expects, get_first_table(expects, model.ids.shape[1], offset), scale).examine():
            found |= isinstance(one, Finding) or (isinstance(one, Unknown) and one.needs == BOTH)
            yield one
        if not found:
            yield from model_lengths.check_lengths(model, expects, offset)
    except SubjectError as error:
        yield explain_error(model, error)


def explain_error(model: TokenModel, error: SubjectError) -> Finding | Unknown:
    """Return the result for a model that raised: a finding if it raises for its own ids, else what cannot be determined."""
    try:
        model.run()
    except SubjectError as own:
        return report_refusal([str(own)])
    return Unknown(
        f"the rest of the model: it {error.did}",
        "a sample of ids that it accepts, also with one id replaced by another of them",
        is_required=True,
    )


def describe_call(model: TokenModel) -> str:
    """Describe how a model was called."""
    t, least = model.ids.shape[1], f", the first of {model.sample_length:,}" if model.sample_length > model.ids.shape[1] else ""
    changed = f"; {TRIED} of the tokens were replaced, one at a time" if t > TRIED else ""
    size = sum(one.numel() for one in model.module.parameters())
    return f"token ids {tuple(model.ids.shape)}{least}{changed}; {size:,} parameters"


def get_first_table(expects: Mask, t: int, offset: Offset) -> Tensor:
    """Return who may see whom in the first sequence, bool (t, t), in any head."""
    table = expects.table(t, t, offset)
    return table[(None,) * (4 - table.dim())][0].any(0).expand(t, t)


@dataclass(frozen=True, eq=False)
class ModelExamination:
    """A model, the expectation, who may see whom by it in the first sequence, bool (t, t), and the stated scale."""

    model: TokenModel
    expects: Mask
    allowed: Tensor
    scale: float | None

    def examine(self) -> Iterator[Finding | Checked | Unknown | Visibility]:
        """Yield the results for the layers, the whole model and its cache, and the picture of the whole model."""
        outputs = self.model.run()
        if outputs is not None and not outputs.isfinite().all():
            yield self.report_nonfinite(outputs)
            return
        again = self.model.run()
        if outputs is not None and again is not None:
            change = (again - outputs).abs()
            if change.max() > self.model.estimate_noise(outputs):
                yield self.report_randomness(change)
                return
        seeing = record_layers(self.model)
        moved = None if outputs is None else measure_moves(self.model, outputs)
        right = not seeing.has_cross_attention and not mixes_tokens(seeing.calls)
        for one in itertools.chain(self.check_layers(seeing, moved), self.check_end_to_end(seeing, moved, outputs)):
            right &= not isinstance(one, Finding)
            yield one
        if right and outputs is not None:  # with a leak, decoding with a cache differs anyway
            yield from self.check_cache(outputs)
        yield from check_inference(self.model.module, self.model.run)
        yield from self.check_calls(seeing)

    def check_calls(self, seeing: RecordedLayers) -> Iterator[Finding | Checked | Unknown]:
        """Yield the results for the scale, the rows, the heads and the roles of the calls that were recorded."""
        calls = seeing.calls
        yield from matrix_checks.check_matrices(self.model.module, self.model.run, seeing.recorded)
        recorded = seeing.recorded
        stored = [*(one.name for one in calls), *(one.name for one in recorded.matrices)]
        names = dict.fromkeys([*stored, *recorded.unstored])
        scale = self.scale
        if scale is None and any(
            one.scale is not None and not scale_checks.is_near(one.scale, one.width**-0.5) for one in calls
        ):
            longer = self.record_longer_calls()
            factor = log_scale.read_log_factor(calls, longer)
            if factor is not None:
                scale = factor * math.log(self.model.ids.shape[1])
                yield log_scale.report_log_scale(factor, calls, longer)
        replayed = replay.examine_layers(self.model.module, self.model.run, names, self.expects, scale)
        is_identified = bool(names) and {*names, *(name for name, _ in seeing.missed)} <= replayed.names
        needs = ""
        wrong: set[tuple[str, str]] = set()
        for what, result in all_checks.iterate_checks(calls, scale, in_model=True):
            wrong |= {(result.kind, result.layer)} if isinstance(result, Finding) else set()
            if result is not None and (isinstance(result, Finding) or not seeing.missed):
                yield result
            elif not is_identified:
                needs = needs or self.suggest_layer([one.name for one in calls] or [name for name, _ in seeing.missed])
                yield Unknown(f"whether in each layer {what}", needs, what in all_checks.REQUIRED)
        calls_of_tables = self.record_table_calls(calls)
        yield from bucket_reading.check_buckets(calls_of_tables, self.model.module)
        yield from table_reading.check_tables(calls_of_tables, self.model.module)
        if not seeing.missed and not seeing.has_cross_attention:
            yield from model_positions.check_positions(self.model, calls)
        yield from (one for one in replayed.results if isinstance(one, Checked) or (one.kind, one.layer) not in wrong)
        yield from layer_dropout.check_layers(self.model, names, self.expects)

    def record_table_calls(self, calls: list[InnerCall]) -> list[InnerCall]:
        """Return the calls for many tokens, which show the rows of far distances; empty if no bias is rows of a table."""
        readings = (bucket_reading, table_reading)
        if not any(reading.has_table(one, self.model.module) for one in calls for reading in readings):
            return []
        return self.record_longer_calls() or calls

    def record_longer_calls(self) -> list[InnerCall]:
        """Return the calls for many tokens; empty if the model takes no more."""
        model = self.model
        for t in reversed(model_lengths.LENGTHS):
            if not model.is_sampled or t <= model.sample_length:
                ids = model_lengths.draw_ids(model, t, 0)
                with contextlib.suppress(SubjectError):  # refusing another length is allowed
                    return record_inner_calls(model.module, partial(model.run, ids)).calls
        return []

    def suggest_layer(self, names: Sequence[str]) -> str:
        """Return how to examine one of these layers alone, of those that were tried."""
        found = suggestions.suggest_part(self.model.module, names, self.expects, 0, "model")
        return f"the layers one by one: {found}" if found else suggestions.FUNCTION

    def report_nonfinite(self, outputs: Tensor) -> Finding:
        """Return the finding of non-finite outputs, caused by a non-finite weight or by the first module that makes them so."""
        row = int((~outputs.isfinite().all(-1)).any(0).int().argmax())
        evidence = f"output {row} of the model is not finite"
        weights = [name for name, one in self.model.module.named_parameters() if not one.isfinite().all()]
        if weights:
            more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
            return Finding(
                "blind row", f"{evidence}: there is NaN or inf in the weight {weights[0]}{more}", LOAD, cause="blind"
            )
        where = localize.find_breaking_module(self.model)
        evidence += f"; the first module with outputs that are not finite is {where}" if where else ""
        return Finding("blind row", evidence, BLIND, cause="blind")

    def report_randomness(self, change: Tensor) -> Finding:
        """Return the finding of outputs that differ from call to call."""
        b, i, _ = (int(n) for n in torch.unravel_index(change.argmax(), change.shape))
        where = localize.find_moving_module(self.model, self.model.ids, b, i)
        evidence = f"two calls in evaluation with the same tokens differ by {float(change.max()):.2g}"
        evidence += f"; the first module that differs is {where}" if where else ""
        return Finding("dropout in evaluation", evidence, DRAW, 3.0, "dropout")

    def check_cache(self, outputs: Tensor) -> Iterator[Finding | Checked | Unknown]:
        """Yield how decoding differs from the full forward, for a causal model that takes a cache."""
        model = self.model
        if model.call is model.module and torch.equal(self.allowed, ~make_later_table(*self.allowed.shape)):
            yield from cached_decoding.check_cache(model.module, model.ids, extract_outputs, outputs, str)

    def check_layers(self, seeing: RecordedLayers, moved: OutputMoves | None) -> Iterator[Finding | Checked | Unknown]:
        """Yield findings for layers that see more than they may, or less without a window."""
        layers = seeing.layers
        more = [one for one in layers if self.find_extra(one).any()]
        less = [one for one in layers if one not in more and not is_full_or_window(one.weights > 0, self.allowed)]
        if more:
            yield self.report_leak(more, moved)
        chosen = " and ".join(dict.fromkeys(record_routing(self.model.run).names)) if less else ""
        if chosen:
            what = f"whether {less[0].name} may leave out keys that {self.expects} allows: {chosen} chooses among them"
            yield Unknown(what, "expects= as it is meant")
        elif less:
            i, j = (int(n) for n in (self.allowed & ~(less[0].weights > 0)).nonzero()[0])
            evidence = f"{less[0].name}: row {i} may see token {j}, but puts no weight on it{format_layer_count(less)}"
            yield Finding("wrong mask", evidence, SHOW, 1.8, "mask", less[0].name)
        if layers and not more and not less:
            windows = [one.name for one in layers if not torch.equal(one.weights > 0, self.allowed)]
            evidence = (
                f"the recorded weights of {len(layers)} layer{'s' * (len(layers) > 1)}, any weight above 0 would be detected"
            )
            window = f"; {len(windows)} of them see only nearby tokens, as with a window" if windows else ""
            yield Checked("no layer sees a hidden token", evidence + window)
        if seeing.missed or not layers:
            yield Unknown(
                f"which tokens each query sees in every layer ({describe_missed(seeing.missed)})",
                self.suggest_layer([name for name, _ in seeing.missed]),
            )

    def find_extra(self, seen: LayerWeights) -> Tensor:
        """Return what a layer sees but may not, bool (q, k)."""
        return (seen.weights > 0) & ~self.allowed

    def report_leak(self, more: list[LayerWeights], moved: OutputMoves | None) -> Finding:
        """Return the finding of layers that see too much: the first layer, its first such row, and the key of most weight."""
        extra = self.find_extra(more[0])
        i = int(extra.any(-1).int().argmax())
        j = int((more[0].weights[i] * extra[i]).argmax())
        ahead = make_later_table(*self.allowed.shape)
        evidence = f"{more[0].name}: row {i} puts {float(more[0].weights[i, j]):.2g} on token {j}, which "
        evidence += "comes later" if ahead[i, j] else "it may not see"
        if moved is not None and j in moved.tokens:
            evidence += f"; changing token {j} moves output {i} of the model by {moved.within[i, moved.tokens.index(j)]:.2g}"
        one_off = len(self.allowed) > 2 and torch.equal(extra, ahead & (ahead.cumsum(-1) == 1))
        evidence += " (each row sees one token too many)" if one_off else ""
        kind = "future leak" if ahead[i, j] else "wrong mask"
        return Finding(kind, evidence + format_layer_count(more), (NEXT if one_off else "") + HIDE, 2.0, "mask", more[0].name)

    def check_end_to_end(
        self, seeing: RecordedLayers, moved: OutputMoves | None, outputs: Tensor | None
    ) -> Iterator[Finding | Checked | Unknown | Visibility]:
        """Yield what moves in the whole model, if it gave outputs."""
        if outputs is None or moved is None:
            what = "which outputs depend on which tokens from end to end: the model returned no output (b, t, n)"
            yield Unknown(what, EACH, is_required=not seeing.layers)
        else:
            yield from self.check_moves(seeing, moved, outputs)

    def check_moves(
        self, seeing: RecordedLayers, moved: OutputMoves, outputs: Tensor
    ) -> Iterator[Finding | Checked | Unknown | Visibility]:
        """Yield the outputs that move with a token and may not, and the picture of the whole model."""
        least = self.model.estimate_noise(outputs)
        meets = compute_closure(
            self.allowed, max(len(seeing.layers), 1) if seeing.layers and not seeing.missed else len(self.allowed)
        )
        found = (moved.within > least).cpu()
        leaking = found & ~meets[:, moved.tokens]
        if moved.across > least:
            j, b, i = moved.where
            where = localize.find_moving_module(self.model, replace_token(self.model, j), b, i)
            evidence = f"changing a token of sequence 0 moves outputs of another by {moved.across:.2g}{format_module(where)}"
            yield Finding("batch leak", evidence, f"{MIX} {TURNED}" if has_tokens_first(self.model) else MIX, 1.2, "batch")
        elif not self.expects.is_batch_specific:
            yield from batch_places.check_model(self.model)
        evidence = f"a change of {least:.0e}, with outputs up to {float(outputs.abs().max()):.3g}, would be detected"
        if leaking.any() and not mixes_tokens(seeing.calls) and not any(self.find_extra(one).any() for one in seeing.layers):
            n = int(leaking.any(0).nonzero()[-1])
            i, j = int(leaking[:, n].int().argmax()), moved.tokens[n]
            where = localize.find_moving_module(self.model, replace_token(self.model, j), 0, i)
            if seeing.has_cross_attention and "decoder" not in where:
                yield Unknown(
                    "which outputs depend on which tokens from end to end: an encoder gets the same ids and may see all", BOTH
                )
                return
            evidence = f"changing token {j} moves output {i} of the model by {moved.within[i, n]:.2g}{format_module(where)}"
            yield Finding("future leak" if j > i else "wrong mask", evidence, choose_cure(self.model, where), 1.5, "mask")
        elif not leaking.any() and moved.across <= least:
            yield Checked("from end to end no output depends on a hidden token", evidence)
            if len(meets) > 1 and not (found & (torch.arange(len(found))[:, None] != torch.tensor(moved.tokens))).any():
                what = "any property of the attention: no output depends on any other token"
                yield Unknown(what, NONE, is_required=True)
        yield make_visibility(meets, found, moved, least)


def extract_outputs(returned: Any, ids: Tensor) -> Tensor:
    """Return the outputs (b, t, n). Raises TypeError if there are none for each token."""
    found = find_outputs(returned, ids)
    if found is None:
        raise TypeError("it gives no outputs for each token")
    return found


def choose_cure(model: TokenModel, where: str) -> str:
    """Return the cure for a module that leaks tokens: a mask if it weighs tokens by its own weights, else separate tokens."""
    return ATTEND if where and localize.is_attention_like(model, where) else MIX


def format_module(where: str) -> str:
    """Format the module where an error begins: `; the first module whose output changes there is blocks.2.up`."""
    return f"; the first module whose output changes there is {where}" if where else ""
