"""Examine a whole model of token ids: each layer's recorded attention, and which token moves which output."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.examination import mask_requirements
from regard.examination.call_checks import all_checks, scale_checks
from regard.examination.call_checks.head_checks import mixes_tokens
from regard.examination.call_reading import matrix_checks, table_reading
from regard.examination.call_reading.inner_calls import InnerCall, record_inner_calls
from regard.examination.layer_rules import LayerRules
from regard.examination.mask_requirements import make_later_table
from regard.examination.probe_runner import IN_A_FUNCTION, suggest_part
from regard.examination.probes import batch
from regard.examination.probes.inference import check_inference
from regard.examination.probes.lengths import DRAW
from regard.examination.probes.raises import report_refusal
from regard.examination.probes.routed import record_routing
from regard.examination.progress import ExaminationProgress
from regard.examination.report import Checked, Finding, Report, Unknown, Visibility, prepend_results
from regard.examination.subject import localize
from regard.examination.subject.adapters import SubjectError
from regard.examination.subject.inplace_writes import watch_writes
from regard.examination.subject.token_model import (
    BATCH,
    MOST,
    SPARE,
    TOKENS,
    TokenModel,
    find_outputs,
    make_token_model,
    make_vector_model,
    use_evaluation_mode,
)
from regard.examination.time_limit import UNLIMITED, TimeLimit
from regard.examination.whole_models import cached_decoding, model_lengths, model_positions, replay
from regard.examination.whole_models.layer_masks import HIDE, LayerDifference, compare_layers, report_layers
from regard.examination.whole_models.output_moves import (
    TRIED,
    OutputMoves,
    compute_closure,
    compute_lasting_closure,
    has_tokens_first,
    make_visibility,
    measure_moves,
    replace_token,
)
from regard.examination.whole_models.recorded_layers import RecordedLayers, describe_missed, record_layers, record_sights
from regard.mechanism.mask_algebra import Offset

FORWARDS = TOKENS + 26  # about as many as an examination takes, for a progress bar
MIX = "Keep tokens and sequences separate in that module: norms over the last axis only, no mean, view or shift over tokens."
ATTEND = (
    f"If that module is attention: {HIDE[0].lower()}{HIDE[1:].replace('that layer', 'it')} If not, keep tokens separate in it."
)
TURNED = "If it is intended to take ids (t, b): examine(lambda ids: model(ids.T).transpose(0, 1), sample=ids)."
NONE = "a model that contains attention, with weights other than 0"
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
    rules: LayerRules,
    sample: Any = None,
    scale: float | None = None,
    offset: Offset = 0,
    progress: ExaminationProgress,
    limit: TimeLimit = UNLIMITED,
    vectors: Tensor | None = None,
) -> Report | None:
    """Examine who sees whom in each layer and from end to end, for a model in evaluation; None if a subject takes no tokens.

    A finding in a layer's recorded attention names that layer; one outside of attention names the first module whose output
    moves although its inputs do not. The scale, the heads and the roles of each layer are those of the calls that it really
    makes. `vectors` are tokens of a module that takes these. Raises ConfigError for a sample of ids that is not (b, t) or (t,),
    for a model that raises for all ids tried, and for rules whose patterns do not fit the layers.
    """
    with use_evaluation_mode(subject), watch_writes(subject) as writes, limit.enforce():
        if vectors is None:
            tokens = rules.key_count or min(max(TOKENS, rules.required_tokens + SPARE), MOST)
            sequences = max(mask_requirements.choose_batch_size(rule) for rule in rules.masks)
            model = make_token_model(subject, sample, tokens, sequences)
        else:
            model = make_vector_model(subject, vectors, sample is not None)
        if model is None:
            return None
        is_whole = rules.is_batch_specific or model.is_fixed
        model = replace(model, writes=writes, ids=model.ids if is_whole else model.ids[:BATCH])
        progress.begin_step("layers")
        results: list[Finding | Checked | Unknown | Visibility] = []
        for one in itertools.chain(collect_model_results(model, rules, offset, scale), writes.report_changes()):
            results.append(one)
            progress.add([one] if not isinstance(one, Visibility) else [])
    picture = next((one for one in results if isinstance(one, Visibility)), None)
    return prepend_results(Report(model.name, str(rules), notes=(describe_call(model),), reach=picture), results)


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
    model: TokenModel, rules: LayerRules, offset: Offset, scale: float | None
) -> Iterator[Finding | Checked | Unknown | Visibility]:
    """Yield the results for a model; if it raises, the last is what cannot be determined."""
    found, is_partial = False, False
    examination = ModelExamination(model, rules, offset, scale)
    try:
        for one in examination.examine():
            found |= isinstance(one, Finding)
            is_partial |= isinstance(one, Unknown) and one.needs == BOTH
            yield one
        if found:
            return
        names = [] if is_partial or examination.seeing.unseen else [one.name for one in examination.seeing.layers]
        del examination  # it keeps what was recorded
        lengths = model_lengths.CheckedLengths([], model.ids.shape[1])
        if not is_partial:
            lengths = model_lengths.check_lengths(model, rules, offset, names)
            yield from lengths.results
        t = max(lengths.most, model.ids.shape[1])
        unseen = [rule for rule in rules.masks if not mask_requirements.is_shown(rule, t, offset)]
        yield from (mask_requirements.describe_short_sample(rule, t) for rule in unseen)
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
    return f"{model.tokens} {tuple(model.ids.shape)}{least}{changed}; {model.size:,} parameters"


@dataclass(eq=False)
class ModelExamination:
    """A model, who may see whom in each layer, and the stated scale; `has_leak` is whether a layer of it leaks."""

    model: TokenModel
    rules: LayerRules
    offset: Offset
    scale: float | None
    has_leak: bool = False

    @cached_property
    def seeing(self) -> RecordedLayers:
        """The recorded attention of each layer. Raises ConfigError if patterns of the rules do not fit the layers."""
        seeing = record_layers(self.model, self.rules)
        self.rules.check_names(seeing.names)
        return seeing

    @cached_property
    def mixes_tokens(self) -> bool:
        """Whether heads are split or joined by a view that mixes tokens."""
        return mixes_tokens(self.seeing.calls)

    @cached_property
    def real_queries(self) -> Tensor:
        """The tokens that are padding in no layer, bool (b, t, 1)."""
        b, t = self.model.ids.shape[:2]
        return torch.stack([mask_requirements.find_real_queries(rule, b, t, t) for rule in self.rules.masks]).all(0)

    @cached_property
    def sequence(self) -> int:
        """The sequence whose tokens are replaced: the first of those in which most earlier and later tokens are hidden."""
        b, t = self.model.ids.shape[:2]
        tables = [mask_requirements.expand_mask(rule, b, t, t, self.offset) for rule in self.rules.masks]
        hidden, later = ~torch.stack(tables).all(0) & self.real_queries, make_later_table(t, t, self.offset)
        counts = torch.stack([(hidden & side).sum((1, 2)) + 1 for side in (later, ~later)])
        return int(counts.prod(0).argmax())

    @cached_property
    def tables(self) -> list[Tensor]:
        """Who may see whom in each layer in `sequence`, bool (t, t), in order, or by each rule if no layer is known."""
        t = self.model.ids.shape[1]
        names = [one.name for one in self.seeing.layers if one.seen.shape[1] == t] if not self.seeing.unseen else []
        rules = [self.rules.get_rule(name) for name in names] or self.rules.masks
        return [mask_requirements.expand_mask(rule, len(self.model.ids), t, t, self.offset)[self.sequence] for rule in rules]

    @cached_property
    def reach(self) -> Tensor:
        """Which token may move which output through all layers, bool (t, t)."""
        is_known = bool(self.seeing.layers) and not self.seeing.unseen
        return compute_closure(self.tables) if is_known else compute_lasting_closure(torch.stack(self.tables).any(0))

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
        seeing = self.seeing
        moved = None if outputs is None else measure_moves(self.model, outputs, self.sequence)
        right = not seeing.has_cross_attention and not self.mixes_tokens
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
            factor = scale_checks.read_log_factor(calls, longer)
            if factor is not None:
                scale = factor * math.log(self.model.ids.shape[1])
                yield scale_checks.report_log_scale(factor, calls, longer)
        replayed = replay.examine_layers(self.model.module, self.model.run, names, self.rules, scale)
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
        yield from table_reading.check_tables(self.record_table_calls(calls), self.model.module)
        if not seeing.missed and not seeing.has_cross_attention:
            yield from model_positions.check_positions(self.model, calls)
        yield from (one for one in replayed.results if isinstance(one, Checked) or (one.kind, one.layer) not in wrong)
        yield from replay.check_dropout(self.model, names, self.rules)

    def record_table_calls(self, calls: list[InnerCall]) -> list[InnerCall]:
        """Return the calls for many tokens, which show the rows of far distances; empty if no bias is rows of a table."""
        if not any(table_reading.has_table(one, self.model.module) for one in calls):
            return []
        return self.record_longer_calls() or calls

    def record_longer_calls(self) -> list[InnerCall]:
        """Return the calls for many tokens; empty if the model takes no more."""
        model = self.model
        for t in reversed(model_lengths.choose_lengths(model, self.rules)):
            with contextlib.suppress(SubjectError):  # refusing another length is allowed
                return record_inner_calls(model.module, partial(model.run, model_lengths.draw_ids(model, t, 0))).calls
        return []

    def compare_longer(self) -> list[LayerDifference]:
        """Return each layer next to its rule with as many tokens as it takes; none if it takes no others."""
        for t in reversed(model_lengths.choose_lengths(self.model, self.rules)):
            with contextlib.suppress(SubjectError):  # refusing another length is allowed
                layers, *_ = record_sights(self.model, model_lengths.draw_ids(self.model, t, 0), self.rules)
                return compare_layers(layers, self.rules, self.offset)
        return []

    def suggest_layer(self, names: Sequence[str]) -> str:
        """Return how to examine one of these layers alone, of those that were tried."""
        found = suggest_part(self.model.module, names, self.rules.masks[0], 0, "model")
        return f"the layers one by one: {found}" if found else IN_A_FUNCTION

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
        evidence += format_module(where)
        return Finding("dropout in evaluation", evidence, DRAW, 3.0, "dropout")

    def check_cache(self, outputs: Tensor) -> Iterator[Finding | Checked | Unknown]:
        """Yield how decoding differs from the full forward, for a causal model that takes a cache."""
        model = self.model
        later = make_later_table(*self.reach.shape)
        if model.call is model.module and not model.ids.is_floating_point() and not (self.reach & later).any():
            yield from cached_decoding.check_cache(model.module, model.ids, extract_outputs, outputs, str)

    def check_layers(self, seeing: RecordedLayers, moved: OutputMoves | None) -> Iterator[Finding | Checked | Unknown]:
        """Yield findings for layers that see more or less than their rules say."""
        every = compare_layers(seeing.layers, self.rules, self.offset)
        wrong = [one for one in every if one.extra.any() or one.missing.any()]
        self.has_leak = any(one.extra.any() for one in wrong)
        chosen = " and ".join(dict.fromkeys(record_routing(self.model.run).names)) if wrong else ""
        if chosen and not any(one.extra.any() for one in wrong):
            what = f"whether {wrong[0].sight.name} may leave out keys that {wrong[0].rule} allows: {chosen} chooses among them"
            yield Unknown(what, "expects= as it is meant")
        elif wrong:
            yield from report_layers(every, self.compare_longer(), self.offset, partial(describe_move, moved))
        elif every:
            sentence = f"in {len(every)} layer{'s' * (len(every) > 1)}, by the masks of the recorded calls"
            yield Checked("no layer sees a hidden token, or hides one that its rule allows", sentence)
        measured = replay.examine_masks(self.model.module, self.model.run, [name for name, _ in seeing.unseen], self.rules)
        for one in itertools.chain.from_iterable(measured.values()):
            self.has_leak |= isinstance(one, Finding)
            yield one
        missed = [(name, reason) for name, reason in seeing.unseen if name not in measured]
        if missed or not (every or measured):
            what = f"which tokens each query sees in every layer ({describe_missed(missed)})"
            yield Unknown(what, self.suggest_layer([name for name, _ in missed]), is_required=True)

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
        meets, real = self.reach, self.real_queries[self.sequence]
        found = (moved.within > least).cpu() & real
        leaking = found & ~meets[:, moved.tokens]
        if moved.across > least:
            j, b, i = moved.where
            where = localize.find_moving_module(self.model, replace_token(self.model, j, self.sequence), b, i)
            evidence = f"changing a token of sequence {self.sequence} moves outputs of another by {moved.across:.2g}"
            evidence += format_module(where)
            yield Finding("batch leak", evidence, f"{MIX} {TURNED}" if has_tokens_first(self.model) else MIX, 1.2, "batch")
        elif not self.rules.is_batch_specific and not self.model.is_fixed:
            yield from check_places(self.model)
        evidence = f"a change of {least:.0e}, with outputs up to {float(outputs.abs().max()):.3g}, would be detected"
        if leaking.any() and not self.mixes_tokens and not self.has_leak:
            n = int(leaking.any(0).nonzero()[-1])
            i, j = int(leaking[:, n].int().argmax()), moved.tokens[n]
            where = localize.find_moving_module(self.model, replace_token(self.model, j, self.sequence), self.sequence, i)
            if seeing.has_cross_attention and "decoder" not in where:
                yield Unknown(
                    "which outputs depend on which tokens from end to end: an encoder gets the same ids and may see all", BOTH
                )
                return
            evidence = describe_move(moved, self.sequence, i, j).removeprefix("; ") + format_module(where)
            future = mask_requirements.find_future_pairs(meets, make_later_table(*meets.shape))
            kind = "future leak" if future[i, j] else "wrong mask"
            yield Finding(kind, evidence, choose_cure(self.model, where), 1.5, "mask")
        elif not leaking.any() and moved.across <= least:
            yield Checked("from end to end no output depends on a hidden token", evidence)
            if len(meets) > 1 and not (found & (torch.arange(len(found))[:, None] != torch.tensor(moved.tokens))).any():
                what = "any property of the attention: no output depends on any other token"
                yield Unknown(what, NONE, is_required=True)
        yield make_visibility(meets, found | (meets[:, moved.tokens] & ~real), moved, least)


def check_places(model: TokenModel) -> Iterator[Finding]:
    """Yield the finding of a model whose outputs depend on the place of a sequence in its batch."""
    ids = torch.cat([model_lengths.draw_ids(model, model.ids.shape[1], seed) for seed in range(batch.BATCH)])
    try:
        outputs, again, turned = model.run(ids), model.run(ids), model.run(ids.roll(1, 0))
    except SubjectError:  # it is made for another batch
        return
    if outputs is not None and again is not None and turned is not None:
        moved = batch.measure_moves(outputs, again, turned)
        yield from [batch.report_places(moved)] if moved else []


def extract_outputs(returned: Any, ids: Tensor) -> Tensor:
    """Return the outputs (b, t, n). Raises TypeError if there are none for each token."""
    found = find_outputs(returned, ids)
    if found is None:
        raise TypeError("it gives no outputs for each token")
    return found


def describe_move(moved: OutputMoves | None, b: int, i: int, j: int) -> str:
    """Describe how far a token of sequence b moves an output of the model; "" if it was not changed."""
    if moved is None or b != moved.sequence or j not in moved.tokens:
        return ""
    place = f"token {j}{f' of sequence {b}' * (b > 0)}"
    return f"; changing {place} moves output {i} of the model by {moved.within[i, moved.tokens.index(j)]:.2g}"


def choose_cure(model: TokenModel, where: str) -> str:
    """Return the cure for a module that leaks tokens: a mask if it weighs tokens by its own weights, else separate tokens."""
    return ATTEND if where and localize.is_attention_like(model, where) else MIX


def format_module(where: str) -> str:
    """Format the module where an error begins: `; the first module whose output changes there is blocks.2.up`."""
    return f"; the first module whose output changes there is {where}" if where else ""
