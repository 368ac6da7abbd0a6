"""The state of this thread: running modules, their watchers, and the dispatch of an attention call to them.

The state is per thread, so that recordings of two threads do not mix. Of a thread's watchers only those entered in the running
context are active, so that recordings of two asyncio tasks do not mix. Nothing is recorded in a backward pass: what activation
checkpointing recomputes was recorded in the forward.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as backward
from torch._C import _get_tracing_state as tracing
from torch._C import _len_torch_function_stack as height
from torch._C import _pop_torch_function_stack as pop
from torch._C import _push_on_torch_function_stack as push
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

NextHandler = Callable[[AttentionCall, CallAdapter], Any]


class Watcher(Protocol):
    """An object that is notified of what a model does: a recording or an intervention."""

    names: dict[int, str]  # of the watched modules, by id
    can_change_calls: bool  # whether it may change a call; such a watcher handles a call before those that only record
    needs_graph: bool  # whether it keeps the graph of calls, so that reentrant checkpoints may not cut it
    changes_scores: bool  # whether it may compute weights that are no softmax again, by the functions that made them

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward of a watched module that no other watched module called."""

    def handle_generation(self, module: nn.Module, sequences: Tensor, prompts: int, given: dict[str, Any]) -> None:
        """Handle the token ids (n, t) that a watched module's `generate` returned for a number of prompts.

        given: its arguments with names.
        """

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: NextHandler) -> Any:
        """Handle an attention call in the module of this name and return what the caller gets."""

    def change_recurrence(self, call: RecurrenceCall, adapter: CallAdapter, name: str) -> tuple[RecurrenceCall, CallAdapter]:
        """Return a call without a softmax in the module of this name, and how it runs, as the model gets it instead."""

    def handle_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Handle a recurrence that ran in the module of this name."""

    def may_miss(self, module: nn.Module, length: int = 0) -> bool:
        """Return whether a module that ends and mixes tokens may be reported as missed: nothing of it is known yet.

        With the number of tokens of a loop, this is so if no map without a softmax that is as long is known.
        """

    def handle_token_mixer(self, module: nn.Module, reason: str, length: int = 0) -> None:
        """Handle the end of a watched module that mixes tokens, read or not, and the reason why it may not be."""

    def handle_division(self, call: AttentionCall, note: str, name: str) -> None:
        """Handle what a context was divided by in place of the sums of its weights, which is known after its call."""

    def handle_unread_part(self, note: str, name: str) -> None:
        """Handle what the calls of the module of this name do not hold, in words, as a further product of their weights."""

    def report_missed(self, missed: MissedCall) -> None:
        """Handle an attention kernel that ran and could not be intercepted."""


class WatcherEntry(NamedTuple):
    """A watcher, the frames of the thread that it was entered in, and the number that marks it in its context."""

    watcher: Watcher
    frames: list[ModuleFrame]
    number: int


OPEN_ENTRIES: list[WatcherEntry] = []  # entries of all threads
ENTERED_ENTRIES: ContextVar[frozenset[int]] = ContextVar("entered", default=frozenset())  # numbers of this context's entries


class ThreadState(threading.local):
    """The watchers and running modules of one thread.

    The transitions, each undone when what began it ends, also by an exception:

    - `watch_modules` adds an entry, the mode if there is none, and the skippable modules. When the last entry is removed, all
      is reset, even if another thread closes the context.
    - A call of a module pushes a frame and pops it. The outermost frame also pushes the mode onto torch's stack, unless it is
      kept there; inferred masks are cleared when the outermost frame starts and ends.
    - A pause (`InterceptionPause`) raises the depth of pauses and pops the mode: for watchers that handle a call, and for
      compiled functions.
    - A skippable module, torch's own encoder layers, and modules that only other threads watch, run with a flag set and
      without the mode.

    Calls are dispatched only while the thread is active: watched, not paused, not in a backward pass and not traced.
    """

    def __init__(self) -> None:
        # changed by watch_modules and activate_watchers
        self.entries: list[WatcherEntry] = []
        self.watchers: list[Watcher] = []  # those of the running context; those that change calls stand last
        self.context: frozenset[int] | None = None  # the context of `watchers`
        self.mode: Any = None  # the torch function mode, while there are entries
        self.skippable_modules: dict[int, nn.Module] = {}  # watched modules that cannot attend, by id
        # changed by push_frame, pop_frame and keep_mode
        self.frames: list[ModuleFrame] = []
        self.keeps_mode = False  # whether the mode stays on torch's stack between forwards
        self.inferred_masks: dict[Any, tuple[Any, ...]] = {}  # of this forward: masks, their fingerprints, what was inferred
        # changed by InterceptionPause
        self.pause_depth = 0  # 0 while calls are dispatched
        # changed by module_calls.py
        self.is_in_skippable = False  # while a skippable module runs
        self.is_in_unwatched = False  # inside a module reported to watchers of other threads or tasks
        self.is_in_fast_path = False  # inside a torch module that the mode would slow down, with the mode popped
        # changed by the module that each belongs to
        self.compiled_frame: tuple[int, Any] | None = None  # torch_compile.py: id of the running frame, its exit stack
        self.compiled_call: Any = None  # torch_compile.py: the CompiledCall that runs
        self.is_cross: bool | None = None  # torch_modules.py: whether the next kernel call is cross attention, if known
        self.effects = 0  # number of calls, reports and choices by numbers, which repeated_layers.py compares
        self.parent_rows = WeakTensorKeyDictionary()  # beam_rows.py: keys of a decoder: each row's parent in the previous step

    @property
    def is_active(self) -> bool:
        """Whether operations are recorded now: not in a backward pass, and not while torch.jit traces."""
        return bool(self.watchers) and not self.pause_depth and backward() == -1 and tracing() is None


STATE = ThreadState()
THREAD = "it ran in another thread than record: enter record in the thread that runs the model"
TASK = "it ran in another task than record: enter record in the task that runs the model"
TRACED = "the model is traced here, so its tensors have no data: record it when it runs"


def activate_watchers(anew: bool = False) -> None:
    """Activate those of this thread's watchers that were entered in the running context or in one it was copied from."""
    context = ENTERED_ENTRIES.get()
    if anew or context is not STATE.context:
        STATE.context = context
        here = [entry.watcher for entry in STATE.entries if entry.number in context]
        STATE.watchers[:] = sorted(here, key=lambda one: one.can_change_calls)


def notify_other_threads(module: nn.Module) -> bool:
    """Report a module that runs here to its watchers in other threads or tasks; return whether there are any.

    Return False where a watcher of this thread watches the module.
    """
    if any(id(module) in watcher.names for watcher in STATE.watchers):
        return False
    other_entries = [
        one for one in OPEN_ENTRIES.copy() if id(module) in one.watcher.names or getattr(module, "_is_replica", False)
    ]
    for entry in other_entries:  # replicas are made by nn.DataParallel
        here, name = entry.frames is STATE.frames, entry.watcher.names.get(id(module), "")
        entry.watcher.report_missed(MissedCall("tasks" if here else "threads", name, TASK if here else THREAD))
    return bool(other_entries)


def push_frame(module: nn.Module, args: Any, kwargs: Any) -> ModuleFrame:
    """Push the frame of a module that starts; notify its watchers, except those already notified of a calling module."""
    if STATE.frames:
        STATE.frames[-1].release_steps()
    above = STATE.frames[-1].watchers if STATE.frames else ()
    outermost = not STATE.frames
    if outermost:
        STATE.inferred_masks.clear()
        STATE.mode.reset(any(watcher.changes_scores for watcher in STATE.watchers))
        if len(OPEN_ENTRIES) > len(STATE.watchers):
            notify_other_threads(module)
    if len(above) < len(STATE.watchers):
        new = tuple(one for one in STATE.watchers if id(module) in one.names and one not in above)
        for watcher in new:
            watcher.start_forward(module, args, kwargs)
        above += new
    frame = ModuleFrame(module, above, args, kwargs)
    STATE.frames.append(frame)
    if outermost and not keep_mode(module):
        push(STATE.mode)
    frame.layer = STATE.mode.layers.start(frame)
    return frame


def keep_mode(module: nn.Module) -> bool:
    """Keep the mode on the stack between forwards while a method of the model runs; return whether it stays.

    The mode has to stay where a submodule is the outermost one that was called, inside a method that was called by its name.
    """
    if not STATE.keeps_mode and any(watcher.names.get(id(module)) for watcher in STATE.watchers):
        STATE.keeps_mode = find_direct_call(module) is not None
        if STATE.keeps_mode:
            push(STATE.mode)
    return STATE.keeps_mode


def pop_frame(frame: ModuleFrame) -> None:
    """Pop the frame of a module that returned or raised, with the frames of modules that it called."""
    if STATE.frames and STATE.frames[-1] is frame:
        frame.release_steps()
    frames = STATE.frames
    if frame in frames:
        place = frames.index(frame)
        for one in frames[place:]:
            one.contexts.clear()  # its calls refer to the frame
        del frames[place:]
    if not frames:
        STATE.inferred_masks.clear()
        if STATE.mode is not None:
            STATE.mode.undivided.clear()
            STATE.mode.loops.clear()
            STATE.mode.positions.clear()
            STATE.mode.layers.clear()
            STATE.mode.tracker.linear.clear()
            STATE.mode.tracker.blocks.clear()
            STATE.mode.weight_steps.restart(is_active=False)
        if not STATE.keeps_mode:
            remove_mode()


def remove_mode() -> None:
    """Remove this thread's mode from the torch function stack, keeping the modes that were pushed after it."""
    above = []
    while height():
        mode = pop()
        if mode is STATE.mode:
            break
        above.append(mode)
    for one in reversed(above):
        push(one)


def pop_mode() -> bool:
    """Pop this thread's mode off the torch function stack if it is on top; return whether it was."""
    if not height():
        return False
    mode = pop()
    if mode is STATE.mode:
        return True
    push(mode)
    return False


class InterceptionPause:
    """A context in which nothing is recorded, and functions run without this thread's mode."""

    def __enter__(self) -> None:
        if STATE.frames:
            STATE.frames[-1].follow_deferred_steps()
        STATE.pause_depth += 1
        self.taken = pop_mode()

    def __exit__(self, *_: object) -> None:
        if self.taken:
            push(STATE.mode)
        STATE.pause_depth -= 1


def dispatch_call(
    kernel: str, run: Callable[[], Any], read_call: Callable[[], tuple[AttentionCall | RecurrenceCall, CallAdapter]]
) -> Any:
    """Dispatch a call of a kernel to its watchers and return what the caller gets.

    If the arguments cannot be read, the kernel runs as it was called and is reported as missed.
    """
    if not STATE.is_active or not is_inside_watched(kernel):
        return run()
    STATE.effects += 1
    if STATE.frames:
        STATE.frames[-1].follow_deferred_steps()
    try:
        with disable_modes():
            call, adapter = read_call()
    except Exception as error:  # an unreadable call must not stop the model
        result = run()
        report_missed(kernel, explain_error(error))
        return result
    with InterceptionPause():
        if isinstance(call, AttentionCall):
            result = (
                call_next(STATE.watchers.copy(), call, adapter) if adapter.postpone is None else change_block(call, adapter)
            )
            if STATE.mode is not None and STATE.mode.positions.stored:
                STATE.mode.follow_positions(STATE.mode.positions.follow_call, call, adapter, result)
            is_kept = adapter.context is not None and adapter.postpone is None
            if STATE.frames and is_kept and not all(one.can_change_calls for one in STATE.watchers):
                STATE.frames[-1].add_context(call, adapter.context, result)
            return result
        call, adapter = change_recurrence(call, adapter)
        result = adapter.run()
        if adapter.postpone is None:
            dispatch_recurrence(call)
        else:
            adapter.postpone(call, result)
        return result


def change_block(call: AttentionCall, adapter: CallAdapter) -> Any:
    """Return what the caller of a block of keys gets, with the changes of interventions; its recording is postponed."""
    watchers = [one for one in STATE.watchers if one.can_change_calls]
    if adapter.unchanged:
        report_missed(call.kernel, adapter.unchanged, watchers)
        result = adapter.run()
    else:
        result = call_next(watchers, call, adapter)
    assert adapter.postpone is not None
    adapter.postpone(call, result)
    return result


def dispatch_ended(kernel: str, read_calls: Callable[[], list[AttentionCall]]) -> None:
    """Pass calls that have run in a module that ends to the watchers that record; report them if they cannot be read."""
    if not STATE.is_active:
        return
    watchers = [one for one in STATE.watchers if not one.can_change_calls]
    with InterceptionPause():
        try:
            with disable_modes(), torch.no_grad():
                calls = read_calls()
        except Exception as error:  # an unreadable call must not stop the model
            report_missed(kernel, explain_error(error), watchers)
            return
        for call in calls:
            call_next(watchers.copy(), call, CallAdapter(lambda: None))


def change_recurrence(call: RecurrenceCall, adapter: CallAdapter) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a call without a softmax, and how it runs, with the changes of every intervention, the last first."""
    for watcher in reversed(STATE.watchers):
        name = find_name(watcher) if watcher.can_change_calls else None
        if name is not None:
            call, adapter = watcher.change_recurrence(call, adapter, name)
    read, write = adapter.context, adapter.result
    if not adapter.context_changes or read is None or write is None:
        return call, adapter
    result = adapter.run()
    context = read(result)
    for change in reversed(adapter.context_changes):
        context = change(context)
    return call, replace(adapter, run=lambda: write(context, result), context_changes=())


def dispatch_recurrence(call: RecurrenceCall, watchers: list[Watcher] | None = None) -> None:
    """Pass a call without a softmax to every watcher of a running module, or to those of some watchers, the last first."""
    for watcher, name in reversed(list_owners(watchers)):
        watcher.handle_recurrence(call, name)


def call_next(watchers: list[Watcher], call: AttentionCall, adapter: CallAdapter) -> Any:
    """Pass a call to the watchers of the module that made it, the last first, and return what the caller gets.

    Each watcher calls the next one; after the last of them the call runs as the adapter defines.
    """
    while watchers:
        watcher = watchers.pop()
        name = find_name(watcher, call.module)
        if name is not None:
            return watcher.handle_call(call, adapter, name, partial(call_next, watchers))
    return adapter.run()


def explain_error(error: Exception) -> str:
    """Return the reason why a call could not be read."""
    said = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}".split("\n")[0]
    return said if isinstance(error, UnreadableError) else f"its arguments could not be read ({said})"


def find_name(watcher: Watcher, module: nn.Module | None = None) -> str | None:
    """Return the watcher's name for a module, or for the innermost running one that it watches; None if there is none."""
    name = watcher.names.get(id(module))
    for frame in reversed(STATE.frames) if name is None else ():
        name = watcher.names.get(id(frame.module))
        if name is not None:
            break
    return name


def list_owners(watchers: Iterable[Watcher] | None = None, module: nn.Module | None = None) -> list[tuple[Any, str]]:
    """Return all watchers, or some, of a module or the running ones, each with its name for the innermost that it watches."""
    every = STATE.watchers if watchers is None else watchers
    return [(watcher, name) for watcher in every if (name := find_name(watcher, module)) is not None]


def is_inside_watched(kernel: str) -> bool:
    """Return whether a watched module is running; report a kernel of a module whose method was called by its name."""
    if STATE.frames:
        return bool(STATE.frames[-1].watchers) or any(find_name(watcher) is not None for watcher in STATE.watchers)
    direct_call = find_direct_call()
    if direct_call is not None:
        watcher, module, name = direct_call
        said = f"the module's {name} was called directly, which bypasses its hooks: call module(...)"
        watcher.report_missed(MissedCall(kernel, watcher.names[id(module)], TRACED if torch.compiler.is_exporting() else said))
    return False


def find_direct_call(innermost: nn.Module | None = None) -> tuple[Watcher, nn.Module, str] | None:
    """Return the innermost watched module with a running method, except `innermost`: its watcher, itself, the method."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(module, nn.Module) and module is not innermost:
            for watcher in STATE.watchers:
                if id(module) in watcher.names:
                    return watcher, module, frame.f_code.co_name
    return None


def report_missed(kernel: str, reason: str, watchers: Iterable[Watcher] | None = None, module: nn.Module | None = None) -> None:
    """Report a call that could not be read to every watcher of a module or a running one, or to those of some watchers."""
    STATE.effects += 1
    for watcher, name in list_owners(watchers, module):
        watcher.report_missed(MissedCall(kernel, name, reason))


def report_unread_part(reason: str, watchers: list[Watcher]) -> None:
    """Report to watchers of a running module what its calls do not hold."""
    STATE.effects += 1
    for watcher, name in list_owners(watchers):
        watcher.handle_unread_part(reason, name)


def choose_by_numbers(choice: bool) -> bool:
    """Return a choice that depends on the numbers of a tensor, so that it may be another one in a layer of the same steps."""
    STATE.effects += 1
    return choice
