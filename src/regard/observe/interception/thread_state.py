"""The state of this thread: running modules, and their watchers.

The state is per thread, so that recordings of two threads do not mix. Of a thread's watchers only those entered in the running
context are active, so that recordings of two asyncio tasks do not mix. Nothing is recorded in a backward pass: what activation
checkpointing recomputes was recorded in the forward.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as backward
from torch._C import _get_tracing_state as tracing
from torch._C import _len_torch_function_stack as height
from torch._C import _pop_torch_function_stack as pop
from torch._C import _push_on_torch_function_stack as push
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall, OtherWeights
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

NextHandler = Callable[[AttentionCall, CallAdapter], Any]


class Watcher:
    """An object that is notified of what a model does: a recording or an intervention. By default it changes nothing."""

    names: dict[int, str]  # of the watched modules, by id
    can_change_calls = False  # whether it may change a call; such a watcher handles a call before those that only record
    needs_graph = False  # whether it keeps the graph of calls, so that reentrant checkpoints may not cut it
    changes_scores = False  # whether it may compute weights that are no softmax again, by the functions that made them

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward of a watched module that no other watched module called."""

    def handle_generation(self, module: nn.Module, sequences: Tensor, prompts: int, given: dict[str, Any]) -> None:
        """Handle the token ids (n, t) that a watched module's `generate` returned for a number of prompts.

        given: its arguments with names.
        """

    def handle_call(self, call: AttentionCall, adapter: CallAdapter, name: str, proceed: NextHandler) -> Any:
        """Handle an attention call in the module of this name and return what the caller gets."""
        return proceed(call, adapter)

    def change_recurrence(self, call: RecurrenceCall, adapter: CallAdapter, name: str) -> tuple[RecurrenceCall, CallAdapter]:
        """Return a call without a softmax in the module of this name, and how it runs, as the model gets it instead."""
        return call, adapter

    def handle_recurrence(self, call: RecurrenceCall, name: str) -> None:
        """Handle a recurrence that ran in the module of this name."""

    def handle_token_mixer(self, module: nn.Module, reason: str) -> None:
        """Handle the end of a watched module that mixes tokens, read or not, and the reason why it may not be."""

    def handle_division(self, call: AttentionCall, note: str, name: str) -> None:
        """Handle what a context was divided by in place of the sums of its weights, which is known after its call."""

    def handle_unread_part(self, note: str, name: str) -> None:
        """Handle what the calls of the module of this name do not hold, in words, as a further product of their weights."""

    def handle_empty_call(self, name: str) -> None:
        """Handle a call of the module of this name that has no queries or no keys, and so no weights."""

    def handle_other_weights(self, found: OtherWeights) -> None:
        """Handle normalized weights that were multiplied with something, of which no pair of tokens is known."""

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
        self.sequences: tuple[Tensor, ...] = ()  # torch_modules.py: (b, t, c), whose projections its queries and keys are
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
    frames = STATE.frames
    if frame in frames:
        del frames[frames.index(frame) :]
    if not frames:
        STATE.inferred_masks.clear()
        if STATE.mode is not None:
            STATE.mode.undivided.clear()
            STATE.mode.positions.clear()
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
        STATE.pause_depth += 1
        self.taken = pop_mode()

    def __exit__(self, *_: object) -> None:
        if self.taken:
            push(STATE.mode)
        STATE.pause_depth -= 1


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
