"""The state of this thread: running modules, their watchers, and the dispatch of an attention call to them.

The state is per thread, so that recordings of two threads do not mix. Of a thread's watchers only those entered in the running
context are active, so that recordings of two asyncio tasks do not mix. Nothing is recorded in a backward pass: what activation
checkpointing recomputes was recorded in the forward.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
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

from regard.observe.doors.lineage import Frame
from regard.observe.doors.passage import Crossing, Missed, Passage
from regard.observe.doors.plain import UnreadableError, unseen
from regard.observe.rules import Found, of_mask

MASKS = 8  # cached until the forward ends
Proceed = Callable[[Passage, Crossing], Any]


class Watcher(Protocol):
    """An object that is notified of what a model does: a recorder or an intervention."""

    names: dict[int, str]  # of the watched modules, by id
    changes: bool  # whether it may change a call; such a watcher handles a call before those that only record

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward of a watched module that no other watched module called."""

    def returned(self, module: nn.Module, sequences: Tensor, prompts: int) -> None:
        """Handle the token ids (n, t) that a watched module's `generate` returned for a number of prompts."""

    def meet(self, passage: Passage, crossing: Crossing, name: str, proceed: Proceed) -> Any:
        """Handle an attention call in the module of this name and return what the caller gets."""

    def miss(self, missed: Missed) -> None:
        """Handle an attention kernel that ran and could not be intercepted."""


class Entry(NamedTuple):
    """A watcher, the frames of the thread that it was entered in, and the number that marks it in its context."""

    watcher: Watcher
    frames: list[Frame]
    number: int


OPEN: list[Entry] = []  # entries of all threads
ENTERED: ContextVar[frozenset[int]] = ContextVar("entered", default=frozenset())  # numbers of this context's entries


class Scene(threading.local):
    """The watchers and running modules of one thread.

    Entering a watching context appends an entry and leaving it removes the entry; a module call pushes a frame and pops it; a
    pause raises and lowers the depth of pauses. Calls are dispatched only while the thread is active: watched, not paused, not
    in a backward pass and not traced.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.watchers: list[Watcher] = []  # those of the running context; those that change calls stand last
        self.context: frozenset[int] | None = None  # the context of `watchers`
        self.frames: list[Frame] = []
        self.quiet = 0  # depth of pauses: 0 while calls are dispatched
        self.mode: Any = None  # the torch function mode, while there are entries
        self.harmless: dict[int, nn.Module] = {}  # watched modules that cannot attend, by id
        self.passed = False  # while one of them runs
        self.stays = False  # whether the mode stays on the stack between forwards
        self.compiled: tuple[int, Any] | None = None  # id of the frame of the compiled function that runs, its exit stack
        self.stray = False  # inside a module reported to watchers of other threads or tasks
        self.fast = False  # inside a torch module that the mode would slow down, with the mode popped
        self.crosses: bool | None = None  # whether the next kernel call is cross attention, if its caller knows
        self.masks: dict[Any, tuple[Any, ...]] = {}  # masks of this forward, their fingerprints, their rules
        self.turned = WeakTensorKeyDictionary()  # keys of a decoder: each row's parent row in the previous step

    @property
    def live(self) -> bool:
        """Whether operations are recorded now: not in a backward pass, and not while torch.jit traces."""
        return bool(self.watchers) and not self.quiet and backward() == -1 and tracing() is None


SCENE = Scene()
THREAD = "it ran in another thread than record: enter record in the thread that runs the model"
TASK = "it ran in another task than record: enter record in the task that runs the model"
TRACED = "the model is traced here, and what it computes with are no numbers: record it when it runs"


def look_around(anew: bool = False) -> None:
    """Activate those of this thread's watchers that were entered in the running context or in one it was copied from."""
    context = ENTERED.get()
    if anew or context is not SCENE.context:
        SCENE.context = context
        here = [entry.watcher for entry in SCENE.entries if entry.number in context]
        SCENE.watchers[:] = sorted(here, key=lambda one: one.changes)


def tell_others(module: nn.Module) -> bool:
    """Report a module that runs here to its watchers in other threads or tasks; return whether there are any.

    Return False where a watcher of this thread watches the module.
    """
    if any(id(module) in watcher.names for watcher in SCENE.watchers):
        return False
    around = [one for one in OPEN.copy() if id(module) in one.watcher.names or getattr(module, "_is_replica", False)]
    for entry in around:  # replicas are made by nn.DataParallel
        here, name = entry.frames is SCENE.frames, entry.watcher.names.get(id(module), "")
        entry.watcher.miss(Missed("tasks" if here else "threads", name, TASK if here else THREAD))
    return bool(around)


def begin(module: nn.Module, args: Any, kwargs: Any) -> Frame:
    """Push the frame of a module that starts; notify its watchers, except those already notified of a calling module."""
    above = SCENE.frames[-1].watchers if SCENE.frames else ()
    outermost = not SCENE.frames
    if outermost:
        SCENE.masks.clear()
        SCENE.mode.forget()
        if len(OPEN) > len(SCENE.watchers):
            tell_others(module)
    if len(above) < len(SCENE.watchers):
        new = tuple(one for one in SCENE.watchers if id(module) in one.names and one not in above)
        for watcher in new:
            watcher.enter(module, args, kwargs)
        above += new
    frame = Frame(module, above, args, kwargs)
    SCENE.frames.append(frame)
    if outermost and not stay(module):
        push(SCENE.mode)
    return frame


def stay(module: nn.Module) -> bool:
    """Keep the mode on the stack between forwards while a method of the model runs; return whether it stays.

    The mode has to stay where a submodule is the outermost one that was called, inside a method that was called by its name.
    """
    if not SCENE.stays and any(watcher.names.get(id(module)) for watcher in SCENE.watchers):
        SCENE.stays = called_by_name(module) is not None
        if SCENE.stays:
            push(SCENE.mode)
    return SCENE.stays


def end(frame: Frame) -> None:
    """Pop the frame of a module that returned or raised, with the frames of modules that it called."""
    frames = SCENE.frames
    if frames and frames[-1] is frame:
        frames.pop()
    elif frame in frames:
        del frames[frames.index(frame) :]
    if not frames:
        SCENE.masks.clear()
        if not SCENE.stays:
            remove_mode()


def remove_mode() -> None:
    """Remove this thread's mode from the torch function stack, keeping the modes that were pushed after it."""
    above = []
    while height():
        mode = pop()
        if mode is SCENE.mode:
            break
        above.append(mode)
    for one in reversed(above):
        push(one)


def take_mode_away() -> bool:
    """Pop this thread's mode off the torch function stack if it is on top; return whether it was."""
    if not height():
        return False
    mode = pop()
    if mode is SCENE.mode:
        return True
    push(mode)
    return False


class Quiet:
    """A context in which nothing is recorded, and functions run without this thread's mode."""

    def __enter__(self) -> None:
        SCENE.quiet += 1
        self.taken = take_mode_away()

    def __exit__(self, *_: object) -> None:
        if self.taken:
            push(SCENE.mode)
        SCENE.quiet -= 1


def meet(kernel: str, run: Callable[[], Any], understood: Callable[[], tuple[Passage, Crossing]]) -> Any:
    """Dispatch a call of a kernel to its watchers and return what the caller gets.

    If the arguments cannot be read, the kernel runs as it was called and is reported as missed.
    """
    if not SCENE.live or not watched(kernel):
        return run()
    try:
        with unseen():
            passage, crossing = understood()
    except Exception as error:  # an unreadable call must not stop the model
        result = run()
        missed(kernel, why(error))
        return result
    with Quiet():
        return pass_by(SCENE.watchers.copy(), passage, crossing)


def pass_by(waiting: list[Watcher], passage: Passage, crossing: Crossing) -> Any:
    """Pass a call to the watchers of the module that made it, the last first, and return what the caller gets.

    Each watcher calls the next one; after the last of them the call runs as the adapter defines.
    """
    while waiting:
        watcher = waiting.pop()
        name = name_for(watcher, passage.module)
        if name is not None:
            return watcher.meet(passage, crossing, name, partial(pass_by, waiting))
    return crossing.run()


def why(error: Exception) -> str:
    """Return the reason why a call could not be read."""
    said = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}".split("\n")[0]
    return said if isinstance(error, UnreadableError) else f"its arguments could not be read ({said})"


def name_for(watcher: Watcher, module: nn.Module | None = None) -> str | None:
    """Return the watcher's name for a module, or for the innermost running one that it watches; None if there is none."""
    name = watcher.names.get(id(module))
    for frame in reversed(SCENE.frames) if name is None else ():
        name = watcher.names.get(id(frame.module))
        if name is not None:
            break
    return name


def watched(kernel: str) -> bool:
    """Return whether a watched module is running; report a kernel of a module whose method was called by its name."""
    if SCENE.frames:
        return bool(SCENE.frames[-1].watchers) or any(name_for(watcher) is not None for watcher in SCENE.watchers)
    found = called_by_name()
    if found is not None:
        watcher, inside, name = found
        said = f"the module's {name} was called, not the module: write module(...)"
        watcher.miss(Missed(kernel, watcher.names[id(inside)], TRACED if torch.compiler.is_exporting() else said))
    return False


def called_by_name(innermost: nn.Module | None = None) -> tuple[Watcher, nn.Module, str] | None:
    """Return the innermost watched module with a running method, except `innermost`: its watcher, itself, the method."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        inside = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(inside, nn.Module) and inside is not innermost:
            for watcher in SCENE.watchers:
                if id(inside) in watcher.names:
                    return watcher, inside, frame.f_code.co_name
    return None


def missed(kernel: str, reason: str) -> None:
    """Report a call that could not be read to every watcher of a running module."""
    for watcher in SCENE.watchers:
        name = name_for(watcher)
        if name is not None:
            watcher.miss(Missed(kernel, name, reason))


def read(mask: Tensor, q: Tensor, k: Tensor) -> Found:
    """Return the rule, offset and bias of a mask with four axes, inferred once per forward for all layers that share it."""
    return once((mask,), q, k, lambda: of_mask(mask, q, k))


def once(masks: tuple[Tensor | None, ...], q: Tensor, k: Tensor, found: Callable[[], Found], *how: object) -> Found:
    """Return the rule, offset and bias of some masks, inferred once per forward.

    A result is reused for masks with the same memory, layout and dtype, the same lengths, and the same way to read them, `how`.
    """
    key = *how, *(None if m is None else (m.data_ptr(), m.shape, m.stride(), m.dtype) for m in masks), q.shape, k.shape[2]
    result: Found = remember(key, masks, found)
    return result


def remember(key: Any, held: Iterable[Any], found: Callable[[], Any]) -> Any:
    """Return the result cached under a key in this forward; recompute it if a tensor in `held` has been written to."""
    known = SCENE.masks.pop(key, None)
    if known is None or not all(map(is_unchanged, *known[:2])):
        held = list(held)  # kept alive, so that their memory and ids are not reused
        with torch.no_grad():
            known = held, [fingerprint(x) if isinstance(x, Tensor) else None for x in held], found()
    while len(SCENE.masks) >= MASKS:
        del SCENE.masks[next(iter(SCENE.masks))]
    SCENE.masks[key] = known
    return known[2]


def fingerprint(x: Tensor) -> int | Tensor:
    """Return what changes when x is written to: its version, or a copy of its values where torch may not count all writes.

    torch counts none in inference mode, and none through numpy. To compare copies would make a GPU wait.
    """
    is_counted = x.device.type != "cpu" and not x.is_inference()
    return x._version if is_counted else narrow(x).clone()


def is_unchanged(x: Any, was: int | Tensor | None) -> bool:
    """Return whether a tensor still equals its fingerprint; True for anything that is no tensor."""
    if was is None:
        return True
    return bool(x._version == was) if isinstance(was, int) else torch.equal(narrow(x), was)


def narrow(x: Tensor) -> Tensor:
    """Return x with the axes along which it is expanded reduced to one entry."""
    return x[tuple(slice(None) if stride else slice(1) for stride in x.stride())]
