"""intervene: run a model with changed attention: heads knocked out, edges cut, weights from another recording."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.observe import interception
from regard.observe.attention_changes import Change, Temperature
from regard.observe.change_targets import ChangeTargets
from regard.observe.changed_results import change_returned_weights, change_run
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.interception.handwritten.scores.weight_steps import DIFFERENT
from regard.observe.interception.handwritten.softmax.undivided_contexts import NEARLY
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import NextHandler, Watcher
from regard.observe.patch import Patch
from regard.observe.record import enter_once, refuse_compiled
from regard.observe.recorded_runs.block_outputs import watch_blocks
from regard.observe.recorded_runs.layer_numbers import LayerPlace
from regard.observe.recorded_runs.part_names import describe_module, is_inside
from regard.observe.recorded_runs.run import IMPLICIT
from regard.observe.recorded_runs.run_tracker import RunTracker
from regard.observe.recorded_runs.token_positions import locate_tokens
from regard.observe.recurrence_changes import CONTINUED, explain_impossible, follow_tokens, needs_positions
from regard.observe.weight_changes import change_weights, cut_entries, store_changed_weights

OTHER_KIND = "changes with kind='implicit' are about them"
KNOWN_LATE = (
    "its output ({}) was used before it was known to be that of attention, or is split among ranks, and stays unchanged"
)
RECURRENCE = "it is a recurrence ({}), and stays unchanged"
NO_SCORES = "its weights are stored as they are, and cannot be computed again from scores at another temperature"
DROPPED = "some of its weights were dropped after its softmax, and changed ones cannot be dropped alike"
NO_GRADIENT = "its weights are stored as they are, and cannot be computed again with gradients{}"
REPEATED = (
    "calls attention several times in one run, as for parts of its input or of its heads, and a change applied to each: its "
    "heads and positions are those of each call, and not of recording.map"
)


@enter_once
def intervene(model: nn.Module, *changes: Change) -> Iterator[None]:
    """Change the attention of a model in the context by KnockOut, CutEdges, Temperature and Patch, in the given order.

    Calls are intercepted as `record` does, and a recording inside or around the block sees the changed attention. Activation
    checkpoints are off in the block. A change that applied to no call, or to a part of what a layer computes with its weights,
    is warned of.
    Raises ConfigError for a compiled model and for arguments that are no changes.
    """
    wrong = [change for change in changes if not isinstance(change, Change)]
    if wrong or not isinstance(model, nn.Module):
        raise ConfigError("intervene(model, *changes) needs a torch.nn.Module and KnockOut, CutEdges, Temperature or Patch.")
    modules = dict(model.named_modules())
    refuse_compiled(modules)
    intervention = Intervention(modules, changes)
    blocks = modules if intervention.residual_patches else {}
    with (
        interception.watch_modules(intervention, modules),
        watch_blocks(blocks, intervention.handle_block),
    ):
        yield
    for change in changes:
        if change not in intervention.applied_changes:
            where = "all layers" if change.layer is None else f"layer {change.layer!r}" if change.layer != "" else "the model"
            why = intervention.explain_unused(change)
            warnings.warn(f"{type(change).__name__} of {where} was not applied: {why}.", stacklevel=4)
    for name, reason in (intervention.missed | intervention.unread_parts).items():
        if name in intervention.changed_modules:
            warnings.warn(f"A part of the output of {describe_module(name)} was not changed: {reason}.", stacklevel=4)
    for name in sorted(intervention.repeated_modules):
        warnings.warn(f"{name or 'The model'} {REPEATED}.", stacklevel=4)


def state_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let ConfigErrors of a method of an intervention state which forward raised them, if others before it were changed."""

    @wraps(method)
    def call_and_state(self: "Intervention", *args: Any) -> Any:
        try:
            return method(self, *args)
        except ConfigError as error:
            if self.forwards > 1 and error not in self.stated_errors:
                self.stated_errors.append(error)
                error.args = (f"{error} This is forward {self.forwards} in the block: those before it ran with the changes.",)
            raise

    return call_and_state


class Intervention(Watcher):
    """A watcher that changes the calls of one model."""

    can_change_calls = True

    def __init__(self, modules: Mapping[str, nn.Module], asked: Sequence[Change]) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.residual_patches = [one for one in asked if isinstance(one, Patch) and one.of == "residual"]
        self.requested_changes = [one for one in asked if one not in self.residual_patches]
        self.changes_scores = any(type(one).change_call is not Change.change_call for one in asked)
        self.layers: dict[str, tuple[LayerPlace, int]] = {}  # self-attention that ran, and the tokens before its queries
        self.applied_changes: list[Change] = []
        self.changed_modules: set[str] = set()  # whose calls were changed
        self.repeated_modules: set[str] = set()  # of which a change took positions of several calls of one visit
        self.weighed_modules: set[str] = set()  # whose weights were changed
        self.unread_parts: dict[str, str] = {}  # that calls do not hold, by the module, in words
        self.missed: dict[str, str] = {}  # why calls stay unchanged, by the module that made them
        self.tracker = RunTracker(self.names, lambda _, x: x, self.report_missed)
        self.layer_numbers = self.tracker.layer_numbers
        self.forwards, self.stated_errors = 0, list[ConfigError]()  # errors that state their forward
        self.queries = 0, 0  # of the last self-attention in this forward: their number, and the tokens before them
        self.targets = ChangeTargets(self.layer_numbers, self.requested_changes)

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward, which numbers its layers."""
        self.tracker.start_forward(module, args, kwargs)
        self.forwards += 1
        self.queries = 0, 0

    @state_forward
    def change_recurrence(self, call: RecurrenceCall, adapter: CallAdapter, name: str) -> tuple[RecurrenceCall, CallAdapter]:
        """Return a call of weights that are no softmax, and how it runs, with every change that applies to its layer."""
        plain, read = adapter.plain_call, adapter.context
        meant = self.find_changes_of_recurrence(name)
        if not meant or plain is None or read is None or adapter.result is None:
            return call, adapter
        place = self.layer_numbers.find_place(name, IMPLICIT)
        plain, number = replace(plain, visit=place.visit), place.number_in_part
        if call.must_continue and any(map(needs_positions, meant)):
            try:
                plain, adapter = follow_tokens(self.tracker, call, plain, adapter, name)
            except UnreadableError:
                self.missed[name] = CONTINUED
                meant = [change for change in meant if not needs_positions(change)]
        if adapter.change_weights is None:
            meant = self.select_changes(meant, call, plain, name, number)
        changed = plain
        for change in meant:
            changed = change.change_call(changed, name, number)
        found = None
        try:
            if changed is not plain and adapter.change_weights is not None:
                found = change_weights(changed, adapter)
            elif changed is not plain:
                adapter = cut_entries(changed, adapter)
        except UnreadableError as error:
            self.missed[name] = str(error)
            meant = [change for change in meant if change.change_call(plain, name, number) is plain]
        if not meant:
            return call, adapter
        if found is not None:
            weights, adapter = found
            call = store_changed_weights(call, weights, read(adapter.run()))
        for change in meant:
            self.report_applied(change, place)
        self.changed_modules.add(name)
        changes = [partial(self.change_context, change, plain, name, number) for change in meant]
        return call, replace(adapter, context_changes=(*adapter.context_changes, *reversed(changes)))

    @state_forward
    def change_context(self, change: Change, plain: AttentionCall, name: str, number: int, context: Tensor) -> Tensor:
        """Return the context of a call without a softmax after a change of it."""
        return change.change_context(context, plain, name, number)

    def select_changes(
        self, meant: list[Change], call: RecurrenceCall, plain: AttentionCall, name: str, number: int
    ) -> list[Change]:
        """Return those changes that can be made of a recurrence; note why the others cannot."""
        possible = []
        for change in meant:
            reason = explain_impossible(change, call, plain, change.change_call(plain, name, number))
            if reason:
                self.missed[name] = reason
            else:
                possible.append(change)
        return possible

    def find_changes_of_recurrence(self, name: str) -> list[Change]:
        """Return the changes of a layer without a softmax."""
        if not any(change.kind == IMPLICIT for change in self.requested_changes):
            return []
        return self.targets.select_changes(self.layer_numbers.find_place(name, IMPLICIT), IMPLICIT)

    def handle_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Note why a call without a softmax stays unchanged."""
        meant, is_handwritten = self.find_changes_of_recurrence(name), call.kernel.startswith("by hand")
        if not meant and is_handwritten and any(change.kind != IMPLICIT for change in self.requested_changes):
            reason = f"its weights are no softmax over the keys ({call.kernel}), and stay unchanged: {OTHER_KIND}"
            self.missed.setdefault(name, reason)
        elif meant and name not in self.changed_modules:
            known = KNOWN_LATE if is_handwritten else RECURRENCE
            self.missed.setdefault(name, known.format(call.kernel))

    def handle_division(self, call: AttentionCall, note: str, name: str) -> None:
        """Note that a context was divided by other numbers than the sums of its weights, which are of the unchanged ones."""
        if name in self.weighed_modules and not note.startswith(NEARLY.partition("{")[0]):
            self.unread_parts[name] = note

    def handle_unread_part(self, note: str, name: str) -> None:
        """Note what the calls of a module do not hold, which stays unchanged."""
        self.unread_parts[name] = note

    def report_missed(self, missed: MissedCall) -> None:
        """Note a call that could not be intercepted: it stays unchanged."""
        self.missed[missed.module] = missed.reason

    def explain_unused(self, change: Change) -> str:
        """Return why a change applied to no call: the reason why calls of its layer were missed, or that there were none."""
        reasons = [
            f"{describe_module(name)}: {why}"
            for name, why in self.missed.items()
            if change.layer in (None, name) or type(change.layer) is int
        ]
        return "; ".join(dict.fromkeys(reasons)) or self.layer_numbers.describe_layers(change.kind)

    @state_forward
    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: NextHandler) -> Any:
        """Run the call with every change that applies to its layer.

        Raises ConfigError if its context cannot be replaced, as that of a call that returns weights, and if the number of a
        change's layer means this module and another one, as in an encoder and a decoder.
        """
        kind = self.layer_numbers.infer_kind(call, name)
        is_step = call.is_stepwise and kind == "cross"
        place = self.layer_numbers.find_place(name, kind, is_step)
        if kind == "self" and self.residual_patches:
            self.layers[name] = place, locate_tokens(call, kind).past
        if kind == "self" and any(change.kind == "cross" for change in self.requested_changes):
            self.queries = call.q.shape[2], locate_tokens(call, kind).past
        meant, number = self.targets.select_changes(place, kind), place.number_in_part
        if not meant:
            return proceed(call, adapter)
        calls = 0 if is_step else self.layer_numbers.visits.count_call(name, kind, place.visit)
        if calls and any(depends_on_parts(change, call) for change in meant):
            self.repeated_modules.add(name)
        past = self.queries[1] if kind == "cross" and self.queries[0] == call.q.shape[2] else 0
        call = replace(call, visit=None if is_step else place.visit, past=past)
        whole = [type(change).__name__ for change in meant if not change.can_change_parts]
        if call.rank_part is not None and whole:
            raise ConfigError(f"{whole[0]} needs all heads of {name}, but they are DTensors, of which this rank has a part.")
        read, write = adapter.context, adapter.result
        if read is None or write is None or call.v is None:
            raise ConfigError(
                f"{name} computes its attention ({call.kernel}) as a whole, so it cannot be changed. If it is an "
                "nn.MultiheadAttention, call it with need_weights=False."
            )
        found = None
        if call.has_stored_weights:
            found, adapter, meant = self.change_stored_call(call, adapter, meant, name, number)
        elif call.has_dropped_weights:
            meant = self.leave_out(
                meant, [one for one in meant if one.change_call(call, name, number) is not call], name, DROPPED
            )
        for change in meant:
            self.report_applied(change, place)
        self.changed_modules |= {name} if meant else set()
        changed = call
        for change in meant:
            changed = change.change_call(changed, name, number)
        if changed is not call or any(isinstance(change, Patch) for change in meant):
            self.weighed_modules.add(name)
        if found is not None:
            changed, adapter = found
        elif changed is not call:
            own = meant[0] if len(meant) == 1 else None
            adapter = change_run(
                adapter, changed, lambda: None if own is None else own.compute_context(changed, call, name, number)
            )
        result = change_returned_weights(proceed(changed, adapter), adapter, meant, changed, name, number)
        context = read(result)
        for change in sorted(meant, key=lambda change: not change.computes_context):
            context = change.change_context(context, changed, name, number)
        return write(context, result)

    def change_stored_call(
        self, call: AttentionCall, adapter: CallAdapter, meant: list[Change], name: str, number: int
    ) -> tuple[tuple[AttentionCall, CallAdapter] | None, CallAdapter, list[Change]]:
        """Return a call whose weights are stored as they are, and how it runs, by the functions that made its weights.

        None if they cannot run again, or if a change computes contexts from queries and keys: then the adapter has run, and
        those changes alone are returned that the stored weights allow; why not the others is noted.
        """
        plain, reason = None if adapter.plain_call is None else replace(adapter.plain_call, visit=call.visit), ""
        if plain is not None and all(type(change).compute_context is Change.compute_context for change in meant):
            for change in meant:
                plain = change.change_call(plain, name, number)
            try:
                found = change_weights(plain, adapter)
            except UnreadableError as error:
                reason = str(error)
            else:
                new = (call, adapter) if found is None else (replace(call, bias=found[0].detach().log()), found[1])
                return new, adapter, meant
        scored = [change for change in meant if isinstance(change, Temperature)]
        result = adapter.run()
        adapter = replace(adapter, run=lambda: result)
        needs_gradient = torch.is_grad_enabled() and isinstance(result, Tensor) and result.requires_grad
        masked = [] if not needs_gradient and reason != DIFFERENT else meant
        masked = [one for one in masked if one.change_call(call, name, number) is not call]
        meant = self.leave_out(meant, scored, name, NO_SCORES)
        return None, adapter, self.leave_out(meant, masked, name, NO_GRADIENT.format(f": {reason}" if reason else ""))

    def leave_out(self, meant: list[Change], impossible: Sequence[Change], name: str, reason: str) -> list[Change]:
        """Return changes without those that cannot be made of a layer, and note why."""
        left = [change for change in meant if change not in impossible]
        if len(left) < len(meant):
            self.missed[name] = reason
        return left

    @state_forward
    def handle_block(self, block: str, output: Tensor, given: Tensor | None) -> Tensor | None:
        """Return the output (b, t, c) of a block with every patch of it; None if there is none."""
        found = output
        for name, (place, past) in self.layers.items():
            for change in self.residual_patches if is_inside(name, block) else ():
                own = name, place.number_in_part, place.visit
                if change.is_target(name, place.number, "self") and change.find_block(*own) == block:
                    self.targets.check_number(change, place, {place.number})
                    self.report_applied(change, place)
                    found = change.change_residual(found, *own, past)
        return None if found is output else found

    def report_applied(self, change: Change, place: LayerPlace) -> None:
        """Note that a change applied to a layer."""
        self.targets.note_applied(change, place)
        if change not in self.applied_changes:
            self.applied_changes.append(change)


def depends_on_parts(change: Change, call: AttentionCall) -> bool:
    """Return whether a change is another one in a call of a part of the tokens or of the heads."""
    has_places = getattr(change, "queries", None) is not None or getattr(change, "keys", None) is not None
    stated = find_head_counts()[:1] if call.rank_part is None else []
    has_all_heads = 1 < call.q.shape[1] >= max(stated, default=0)
    return has_places or (change.head is not None and not has_all_heads)
