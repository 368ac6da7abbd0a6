"""What is read when a module ends: its loops, linear attention and blocks of keys, and recurrences that are not read."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.call_dispatch import (
    dispatch_call,
    dispatch_ended,
    explain_error,
    report_missed,
)
from regard.observe.interception.handwritten.ancestors.later_divisors import note_division
from regard.observe.interception.handwritten.detection import HandwrittenTracker
from regard.observe.interception.handwritten.handwritten_call import UNFOLLOWED
from regard.observe.interception.handwritten.linear.chunked_attention import ChunkedCall, ChunkedLoop
from regard.observe.interception.handwritten.recurrences.channel_recurrence import read_channel_loop, read_channel_scan
from regard.observe.interception.handwritten.recurrences.fourier_convolutions import read_convolution
from regard.observe.interception.handwritten.recurrences.loop_recurrence import KERNEL, can_read_loop, name_kernel, read_loop
from regard.observe.interception.handwritten.recurrences.loop_tracker import LoopTracker
from regard.observe.interception.handwritten.recurrences.running_means import read_mean
from regard.observe.interception.handwritten.softmax.joined_blocks import read_calls as read_blocked_calls
from regard.observe.interception.handwritten.softmax.undivided_contexts import UndividedContexts
from regard.observe.interception.handwritten.unread.unread_memories import writes_to_memory
from regard.observe.interception.handwritten.unread.unread_recurrences import MEMORY, find_token_axes, find_unread_recurrence
from regard.observe.interception.handwritten.unread.unread_states import INDEXED, takes_states_by_index
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import STATE, Watcher, list_owners

UNSEARCHED = "its operations were searched for a recurrence over tokens until one could not be read: {}"


class ModuleEnds:
    """Reads what a torch function mode has followed in a module that ends."""

    tracker: HandwrittenTracker
    undivided: UndividedContexts
    loops: LoopTracker

    def read_loops(self, frame: ModuleFrame) -> None:
        """Pass the loops of a module that ends to the watchers, before what else was found of the same outputs."""
        log = self.loops.log
        for loop in log.take_loops(frame):
            if not loop.is_reported and not can_read_loop(loop, log.table):
                continue
            outputs = [one.made for one in loop.list_outputs()]
            if self.tracker.linear.reads_for_chunks(frame, outputs) and not can_read_loop(loop, log.table):
                continue  # the chunks are read or reported
            read = partial(note_division, frame, outputs, partial(read_loop, loop, log.table))
            dispatch_call(name_kernel(loop), lambda: None, read)
            if loop.is_recorded:
                self.tracker.linear.forget_calls([read.made for read in loop.reads])
            with suppress(Exception):  # the state that it left is then not continued
                log.end_loop(loop, frame)

    def read_means(self, frame: ModuleFrame) -> None:
        """Pass the running means of a module that ends to the watchers, but for those that are part of linear attention."""
        outputs = {id(one.output) for one in self.tracker.linear.found}
        for one in self.loops.running_sums.take_means(frame, outputs):
            dispatch_call(KERNEL.format("cumsum"), lambda: None, partial(read_mean, one))

    def read_linear(self, frame: ModuleFrame) -> None:
        """Pass the linear attention of a module that ends to the watchers."""
        for found in self.tracker.linear.take_calls(frame):
            read = found.read
            if isinstance(found.call, ChunkedCall | ChunkedLoop) and found.output is not None:
                read = partial(note_division, frame, [found.output], read)
            dispatch_call(found.kernel, lambda: None, read)
            if found.roots:
                self.tracker.used.add_call(found.roots, list_owners(), STATE.frames)

    def read_blocks(self, frame: ModuleFrame) -> None:
        """Pass the calls that blocks of keys amount to, of a module that ends, to the watchers that record."""
        for component in self.tracker.blocks.take_rows(frame):
            dispatch_ended(component[0].blocks[0].call.kernel, partial(read_blocked_calls, component))

    def report_unfinished_sums(self, frame: ModuleFrame) -> None:
        """Report weights of a module that ends that were multiplied with the values of some keys, one by one."""
        for trace in self.tracker.key_sums.take_unfinished(frame):
            report_missed(f"by hand: {trace.function}, mul and add", UNFOLLOWED)

    def read_recurrences(self, frame: ModuleFrame) -> None:
        """Read the convolutions of a module that ends, and its loops and scans over vectors if no map was read of them.

        A recurrence that stays unread is reported, and so is a failure.
        """
        try:
            reads = self.list_channel_reads(frame)
            reason, length, watchers = self.find_unread(frame, bool(reads))
            for one in self.loops.convolutions.take(frame):
                dispatch_call("by hand: convolution", lambda: None, partial(read_convolution, one))
            if not reason:
                if takes_states_by_index(frame, self.loops.log.steps.pop(frame, ())):
                    report_missed("by hand: loop", INDEXED)
                return
            are_read = [self.read_channels(one) for one in reads]
            if any(are_read):
                self.loops.channels.modules.add(frame.module)
                return
            STATE.effects += 1
            for watcher in watchers:
                watcher.handle_token_mixer(frame.module, reason, length)
        except Exception as error:
            report_missed("by hand: loop or scan", UNSEARCHED.format(explain_error(error)))

    def find_unread(self, frame: ModuleFrame, has_reads: bool) -> tuple[str, int, list[Watcher]]:
        """Return why a recurrence of a module is not read yet, its length beside other maps, and who may miss it; else ""."""
        axes = find_token_axes(frame)
        watchers = [one for one in STATE.watchers if one.may_miss(frame.module)] if axes else []
        is_searched = bool(watchers) or (bool(axes and has_reads) and frame.module in self.loops.channels.modules)
        reason = find_unread_recurrence(frame, axes) if is_searched else ""
        if reason:
            return reason, 0, watchers
        for tokens in axes:
            watchers = [one for one in STATE.watchers if one.may_miss(frame.module, tokens.size)]
            if watchers and not is_searched:  # beside maps with a softmax
                reason = find_unread_recurrence(frame, [tokens])
            if watchers and not reason and writes_to_memory(frame, frame.list_operations(), tokens):
                reason = MEMORY
            if reason:
                return reason, tokens.size, watchers
        return "", 0, []

    def list_channel_reads(self, frame: ModuleFrame) -> list[Callable[[], tuple[RecurrenceCall, CallAdapter]]]:
        """Return how the loops and the scans over vectors of a module that ends are read."""
        loops, scans = self.loops.take_channel_loops(frame)
        return [*(partial(read_channel_loop, one) for one in loops), *(partial(read_channel_scan, one) for one in scans)]

    def read_channels(self, read: Callable[[], tuple[RecurrenceCall, CallAdapter]]) -> bool:
        """Pass a loop or a scan over vectors to the watchers; return whether it can be read."""
        try:
            with disable_modes():
                found = read()
        except Exception:  # the module is then reported as one that is not read
            return False
        dispatch_call(found[0].kernel, lambda: None, lambda: found)
        return True

    def report_undivided(self) -> None:
        """Report each call whose context was not divided by the sums of its weights, as its map is."""
        for call, (note, owners) in self.undivided.notes.items():
            for watcher, name in owners:
                watcher.handle_division(call, note, name)
        self.undivided.clear()
