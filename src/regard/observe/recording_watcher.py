"""The watcher of `record`: it handles the attention calls of one model, and adds each to the recording."""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall, OtherWeights
from regard.observe.interception.call_dispatch import explain_error
from regard.observe.interception.handwritten.softmax.undivided_contexts import BLOCKS
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.recurrent.token_mixers import is_part_of_attention
from regard.observe.interception.thread_state import STATE, NextHandler, Watcher
from regard.observe.recorded_runs.block_outputs import BlockStream
from regard.observe.recorded_runs.part_names import describe_module, is_inside
from regard.observe.recorded_runs.run import IMPLICIT, Call, Positions
from regard.observe.recorded_runs.run_tracker import RunTracker
from regard.observe.recording import Recording
from regard.observe.stored_calls.call_graph import CallGraph
from regard.observe.stored_calls.call_store import CallStore, cast_for_autocast, fold_unwritten_slots
from regard.observe.stored_calls.lazy_attentions import Attentions
from regard.observe.stored_calls.packed_calls import PackedCalls
from regard.observe.stored_calls.returned_weights import compare_weights
from regard.observe.stored_calls.selection import Selection
from regard.observe.stored_calls.tensor_store import Store
from regard.observe.token_places.media import ORIGINAL_SIZES, Media, find_pixels, join_media, read_media, read_original_sizes
from regard.observe.token_places.place_inference import infer_places

EMPTY = "a call without queries or keys, which has no weights, is left out"
OTHERWISE = "its own attention does not compute a softmax of q and k"
DROPPED = "its cache has dropped keys between its steps, which later rows of its map do not see"
ENDED = (
    "sequence {} of its output is of a beam that ended before the last step, and is not a row of the map: record a "
    "forward over it, model(sequences)"
)
OTHER_TOKENS = (
    "sequence {} of its output has other tokens than were read, and is not a row of the map: record a forward over it, "
    "model(sequences)"
)


class RecordingWatcher(Watcher):
    """A watcher that records the calls of one model: its tracker finds where a call belongs, its store copies what is kept."""

    def __init__(self, modules: Mapping[str, nn.Module], selection: Selection, store: Store) -> None:
        self.modules = modules
        self.names = {id(module): name for name, module in modules.items()}
        self.media: Media | None = None  # of the current forward
        self.recording = Recording(type(modules[""]).__name__)
        self.selection, self.store, self.needs_graph = selection, CallStore(selection, store), store.values
        self.attended: set[str] = set()  # modules with self-attention
        self.streams: dict[str, BlockStream] = {}  # by the path of a list of modules: the last that one of them returned
        self.read_modules: set[str] = set()  # modules that mix tokens and ran
        self.packed_calls = PackedCalls()
        self.tracker = RunTracker(self.names, self.store.cast_and_select, partial(add_once, self.recording.missed))

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward of a watched module that no other watched module called."""
        self.tracker.start_forward(module, args, kwargs)
        self.media = None
        with suppress(Exception), disable_modes():  # places are inferred without it, or set by hand
            self.media = read_media(module, args, kwargs)
            if self.media is not None and self.media.size is not None and not STATE.mode.positions.stored:
                STATE.mode.positions.start(find_pixels(module, args, kwargs, is_named=self.media.tokens > 0))

    def may_keep_layer(self, name: str, numbers: Callable[[], Set[int | None]]) -> bool:
        """Return whether a layer is selected, or may be by its number from the end."""
        return self.selection.counts_from_end or self.selection.has_layer(name, numbers)

    def remove_unselected(self) -> None:
        """Remove the layers that are not selected, if some are selected by their numbers from the end, now that all ran."""
        runs = self.recording.runs
        for run in runs if self.selection.counts_from_end else ():
            run.keep_layers(lambda name, numbers: self.selection.has_layer(name, lambda: numbers))
        runs[:] = [run for run in runs if run.calls]

    def note_joined_layers(self) -> None:
        """Add a note on each layer whose map joins several calls of one forward."""
        for run in self.recording.runs:
            for name, note in run.describe_joined_layers():
                self.add_note(note, name)

    def fill_places(self) -> None:
        """Infer the places of the tokens of the last run, unless they were set."""
        if self.recording.places is None and self.recording.runs:
            with suppress(Exception):  # a failure here must not stop the program; what needs places says that there are none
                self.recording.places = infer_places(self.modules, self.recording.last)

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: NextHandler) -> Any:
        """Run the call unchanged and record it; return a map in place of the weights if the caller asked for weights."""
        result, context = self.link_context(proceed(call, adapter), adapter)
        graph = None
        if context is not None:
            graph = CallGraph.from_call(call, context, cast_for_autocast(call, call.q[:0]).dtype, name)
        answer = None
        try:
            with disable_tracking():
                returns_map, is_same = compare_weights(call, adapter, result)
                if is_same:
                    recorded = self.record_call(call, name, graph)
                    if adapter.replace_weights is not None and returns_map:
                        answer = Attentions(self.build_full_map(call, recorded))
                else:
                    self.report_missed(MissedCall(call.kernel, name, OTHERWISE))
        except ConfigError:  # wrong arguments of record
            raise
        except Exception as error:  # a failure here must not stop the model
            self.report_missed(MissedCall(call.kernel, name, explain_error(error)))
        return result if adapter.replace_weights is None or answer is None else adapter.replace_weights(result, answer)

    def link_context(self, result: Any, adapter: CallAdapter) -> tuple[Any, Tensor | None]:
        """Return the result and its context (b, h, q, e), with a graph from one to the other; None without gradients.

        The context is kept where values are, for `recording.attribute`. The numbers of the result stay the same.
        """
        wanted = self.needs_graph and torch.is_grad_enabled() and adapter.is_reversible
        if not wanted or adapter.context is None or adapter.result is None:
            return result, None
        context = adapter.context(result)
        return (adapter.result(context, result), context) if context.requires_grad else (result, None)

    def handle_generation(self, module: nn.Module, sequences: Tensor, prompts: int, given: dict[str, Any]) -> None:
        """Match the sequences that a model's `generate` returned to batch rows; the run they belong to becomes the last."""
        root, runs = self.names[id(module)], self.recording.runs
        rows, run = self.tracker.match_sequences(root, sequences, prompts, runs)
        if rows:
            run.rows, self.recording.last_number = rows, runs.index(run)
        if run.media is not None:  # the forwards are not given what only the features of images depend on
            sizes = read_original_sizes(given.get(ORIGINAL_SIZES)) or run.media.original_sizes
            run.media = replace(run.media, original_sizes=sizes)
        has_beams = any(len(call.stored.q) > prompts for call in run.softmax_calls)
        reason = ENDED if has_beams else OTHER_TOKENS
        for n in [n for n, row in enumerate(rows) if row is None]:
            self.report_missed(MissedCall("generate", root, reason.format(n)))

    def change_recurrence(self, call: RecurrenceCall, adapter: CallAdapter, name: str) -> tuple[RecurrenceCall, CallAdapter]:
        """Return a call as it is."""
        return call, adapter

    def handle_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Record a recurrence that ran in the module of this name."""
        try:
            with disable_tracking():
                self.record_recurrence(call, name)
        except Exception as error:  # a failure here must not stop the model
            self.report_missed(MissedCall(call.kernel, name, explain_error(error)))

    def record_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Add a recurrence to the recording, unless its layer is not selected."""
        tracker = self.tracker
        if not self.may_keep_layer(name, lambda: tracker.layer_numbers.find_first_numbers(name, IMPLICIT, False)):
            return
        recorded, found = tracker.append_recurrence(call, name, self.store.store, self.needs_graph)
        if len(recorded.history.stored_calls) == 1:
            self.add_note(found.note, name)
        tracker.run.media = join_media(tracker.run.media, self.media)
        self.add_run()

    def may_miss(self, module: nn.Module) -> bool:
        """Return whether a module is watched and selected, and nothing of it is in the recording, nor was reported before."""
        path = self.names.get(id(module))
        if path is None or path in self.read_modules:
            return False
        calls = [] if self.tracker.is_undecided else self.tracker.run.calls  # of this forward, or of those that it continues
        if calls and calls[-1].name == path:  # the common case first
            return False
        known = [call.name for call in calls] + [one.module for one in self.recording.missed]
        is_known = any(not path or one == path or one.startswith(f"{path}.") for one in known)
        return not is_known and self.selection.has_layer(path, set)

    def handle_token_mixer(self, module: nn.Module, reason: str) -> None:
        """Report a module that mixes tokens if nothing of it is in the recording, neither as recorded nor as missed."""
        missed = MissedCall(type(module).__name__, self.names[id(module)], reason)
        is_new = self.may_miss(module)
        self.read_modules.add(missed.module)
        if is_new and not any(is_part_of_attention(missed, call.name) for call in self.tracker.run.calls):
            self.report_missed(missed)

    def withdraw_missed_parts(self, name: str) -> None:
        """Remove the parts of a module whose attention was recorded from `recording.missed`, if only their place counted."""
        missed = self.recording.missed
        missed[:] = [one for one in missed if not is_part_of_attention(one, name)]

    def add_run(self) -> None:
        """Add the current run to the recording, if it is new."""
        if self.tracker.run not in self.recording.runs:
            self.tracker.run.tokens = vars(self.recording).pop("tokens", None)  # words that were set before it
            self.recording.runs.append(self.tracker.run)
            self.recording.last_number = -1

    def add_note(self, note: str, name: str) -> None:
        """Add what is stored of a module, and why, to `recording.notes`, once; nothing if there is nothing to say."""
        if note:
            add_once(self.recording.notes, f"{describe_module(name)}: {note}")

    def handle_division(self, call: AttentionCall, note: str, name: str) -> None:
        """Note what a context was divided by in place of the sums of its weights, if its module was recorded.

        Blocks of keys are no map of their own: the calls of their module are removed, and missed.
        """
        if note != BLOCKS:
            self.note_recorded_module(note, name)
        elif self.tracker.run.remove_calls(name, self.tracker.step):
            self.report_missed(MissedCall(call.kernel, name, note))

    def handle_unread_part(self, note: str, name: str) -> None:
        """Note what the calls of a module do not hold, if it was recorded."""
        self.note_recorded_module(note, name)

    def note_recorded_module(self, note: str, name: str) -> None:
        """Add a note on the module of this name if it was recorded."""
        if any(one.name == name for one in self.tracker.run.calls):
            self.add_note(note, name)

    def handle_other_weights(self, found: OtherWeights) -> None:
        """Add weights of no known pair of tokens to `recording.other_weights`, if their module is selected."""
        if self.selection.has_layer(found.module, set):
            self.recording.other_weights.append(found)

    def handle_empty_call(self, name: str) -> None:
        """Note that a call without weights is left out."""
        self.read_modules.add(name)
        self.add_note(EMPTY, name)

    def report_missed(self, missed: MissedCall) -> None:
        """Add a kernel that could not be recorded to `recording.missed`, once."""
        add_once(self.recording.missed, missed)

    def build_full_map(self, call: AttentionCall, recorded: Call | None) -> AttentionMap:
        """Return the map of everything the kernel was given: all heads, and the unwritten slots of a cache."""
        if recorded is not None and self.store.is_lossless:
            keys = recorded.stored.stop - recorded.stored.first
            if keys == call.k.shape[2] + call.unwritten_keys:
                return recorded.map
        q, k = (cast_for_autocast(call, x).clone() for x in (call.q, call.k))
        k = F.pad(k, (0, 0, 0, call.unwritten_keys))
        return call.build_map(k, q=q)

    def handle_block(self, block: str, output: Tensor, given: Tensor | None) -> None:
        """Keep the output (b, t, c) of a block as the residual stream after its self-attention, if it has one layer of it.

        That of the module before it in their list is dropped if it is not what this one was given.
        """
        parent, _, place = block.rpartition(".")
        before = self.streams.pop(parent, None)
        if before is not None and before.place < int(place) and before.call.step == self.tracker.step:
            with disable_tracking():
                before.drop_branch(given)
        names = [name for name in self.attended if is_inside(name, block)]
        if len(names) != 1:
            return
        run, step = self.tracker.run, self.tracker.step
        call = next((call for call in reversed(run.softmax_calls) if call.name == names[0] and call.kind == "self"), None)
        if call is None or call.step != step or output.shape[:2] != (len(call.stored.q), call.stored.q.shape[2]):
            return
        with disable_tracking():
            call.history.block = block
            call.stored.residual = self.store.copy_residual(output)
            self.streams[parent] = BlockStream(call, block, int(place), output.detach())

    def record_call(self, call: AttentionCall, name: str, graph: CallGraph | None) -> Call | None:
        """Add a call, with its graph if there is one, to the recording and return it.

        None if its layer is not selected, or if it has no queries or no keys, so that there is no map of it.
        """
        if not call.q.shape[:3].numel() or not call.k.shape[2]:
            self.handle_empty_call(name)
            return None
        tracker, numbers = self.tracker, self.tracker.layer_numbers
        kind = numbers.infer_kind(call, name)
        self.attended |= {name} if kind == "self" else set()
        is_step = call.is_stepwise and kind == "cross"
        if not self.may_keep_layer(name, lambda: numbers.find_first_numbers(name, kind, is_step)):
            return None
        key, history, match = tracker.place_call(call, name, kind)
        call.part = self.packed_calls.place_call(key[:3], key[3], call, STATE.frames[-1])
        if kind == "self":
            before = (tracker.length or 0) if match is None else match.slot
            call = fold_unwritten_slots(call, before + call.q.shape[2])
        if history is None or match is None:
            parent_rows, length = tracker.run.parent_rows, tracker.length
            links = None if is_step else numbers.find_links(name, kind, key[2])
            history, stored = self.store.create_history(call, name, kind, tracker.step, parent_rows, graph, length, links)
        else:
            if match.places is not None:
                self.add_note(DROPPED, name)
            history, stored = self.store.extend_history(history, call, match, tracker.step, graph)
        history.stored_calls.append(stored)
        tracker.run.histories[key] = history
        recorded = Call(history, stored)
        tracker.run.calls.append(recorded)
        with suppress(Exception):  # the run does without ids
            tracker.add_looked_up_ids(call, name, kind)
        tracker.run.media = join_media(tracker.run.media, self.media)
        tracker.run.add_positions((name, kind), find_positions(call))
        self.add_run()
        self.add_note(call.note, name)
        self.withdraw_missed_parts(name)
        return recorded


def find_positions(call: AttentionCall) -> Positions:
    """Return where in the images the queries and keys of a call lie, as far as that was followed."""
    positions = None if STATE.mode is None else STATE.mode.positions
    if positions is None or not positions.stored:
        return None, None
    try:
        return positions.find_tokens(call.q), positions.find_tokens(call.k)
    except Exception:  # a recording does without
        return None, None


def disable_tracking() -> AbstractContextManager[object]:
    """Return a context that no torch mode sees, with neither gradients nor inference mode.

    Tensors made in inference mode could not be used outside it.
    """
    return disable_autograd() if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else disable_modes()


@contextmanager
def disable_autograd() -> Iterator[None]:
    """Disable torch modes, gradients and inference mode while the context is active."""
    with disable_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def add_once(entries: list[Any], new: Any) -> None:
    """Append an entry to a list that does not have it."""
    if new not in entries:
        entries.append(new)
