"""What runs at this moment in this thread: which modules, who watches them, and how a call passes by them.

Each thread has its own scene, so that recordings of two threads do not mix, and of a thread's watchers those watch that were
entered in the context that runs, so that those of two tasks do not. In a backward pass nothing is noted: what checkpointing
runs again has been seen before.
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

MASKS = 8  # that are kept until the forward ends
Proceed = Callable[[Passage, Crossing], Any]


class Watcher(Protocol):
    """Someone who is told what a model does: a recording, or an intervention."""

    names: dict[int, str]  # of the modules it watches, by id
    changes: bool  # whether it may change a call; those meet it before those that only look

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module of its own begins, which no other module of its own called."""

    def returned(self, module: nn.Module, sequences: Tensor, prompts: int) -> None:
        """Note what generate of a module of its own returned for some prompts, token ids (n, t)."""

    def meet(self, passage: Passage, crossing: Crossing, name: str, proceed: Proceed) -> Any:
        """A call of attention passes in a module of this name: what the caller gets."""

    def miss(self, missed: Missed) -> None:
        """A call passed that no door understands."""


class Entry(NamedTuple):
    """A watcher, the thread's frames where it was entered, and a number for its context to know it by."""

    watcher: Watcher
    frames: list[Frame]
    number: int


OPEN: list[Entry] = []  # of all threads
ENTERED: ContextVar[frozenset[int]] = ContextVar("entered", default=frozenset())  # numbers of entries, of this context


class Scene(threading.local):
    """This thread's watchers and running modules."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.watchers: list[Watcher] = []  # of them, those of the context that runs, those that change calls last
        self.context: frozenset[int] | None = None  # the context that they are of
        self.frames: list[Frame] = []
        self.quiet = 0  # inside a door
        self.mode: Any = None  # of functions, while there are watchers
        self.harmless: dict[int, nn.Module] = {}  # modules of the watched models that cannot attend
        self.passed = False  # inside one of them
        self.stays = False  # whether the mode is on between forwards too
        self.compiled: tuple[int, Any] | None = None  # the compiled function that runs, by its frame, and what ends with it
        self.stray = False  # inside a module that was looked at, in a thread without watchers
        self.fast = False  # inside a module of torch's that a mode of functions makes slow, and without it
        self.crosses: bool | None = None  # whether keys of the kernel to come are not of its queries, where a caller knows it
        self.masks: dict[Any, tuple[Any, ...]] = {}  # that this forward has met, with their fingerprints, and what they say
        self.turned = WeakTensorKeyDictionary()  # keys of a decoder, and the rows of the step before that they are of

    @property
    def live(self) -> bool:
        """Whether what happens is to be noted: not in a backward pass, and not while torch.jit traces."""
        return bool(self.watchers) and not self.quiet and backward() == -1 and tracing() is None


SCENE = Scene()
THREAD = "it ran in another thread than record: enter record in the thread that runs the model"
TASK = "it ran in another task than record: enter record in the task that runs the model"
TRACED = "the model is traced here, and what it computes with are no numbers: record it when it runs"


def look_around(anew: bool = False) -> None:
    """Let those of this thread's watchers watch that were entered in the context that runs now, or in one that it came from."""
    context = ENTERED.get()
    if anew or context is not SCENE.context:
        SCENE.context = context
        here = [entry.watcher for entry in SCENE.entries if entry.number in context]
        SCENE.watchers[:] = sorted(here, key=lambda one: one.changes)


def tell_others(module: nn.Module) -> bool:
    """Tell those who watch an outermost module in another thread or task, where nobody does here; return whether any does."""
    if any(id(module) in watcher.names for watcher in SCENE.watchers):
        return False
    around = [one for one in OPEN.copy() if id(module) in one.watcher.names or getattr(module, "_is_replica", False)]
    for entry in around:  # a replica is one of nn.DataParallel
        here, name = entry.frames is SCENE.frames, entry.watcher.names.get(id(module), "")
        entry.watcher.miss(Missed("tasks" if here else "threads", name, TASK if here else THREAD))
    return bool(around)


def begin(module: nn.Module, args: Any, kwargs: Any) -> Frame:
    """A module starts to run; who watches it is told, unless one of its own modules called it."""
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
    """Keep the mode on between forwards where an outermost part runs inside a method that was called by its name."""
    if not SCENE.stays and any(watcher.names.get(id(module)) for watcher in SCENE.watchers):
        SCENE.stays = called_by_name(module) is not None
        if SCENE.stays:
            push(SCENE.mode)
    return SCENE.stays


def end(frame: Frame) -> None:
    """A module has run, or failed; so have those that it called."""
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
    """Take this thread's mode of functions off the stack, from under others that were entered after it, if it is there."""
    above = []
    while height():
        mode = pop()
        if mode is SCENE.mode:
            break
        above.append(mode)
    for one in reversed(above):
        push(one)


def take_mode_away() -> bool:
    """Takes this thread's mode of functions off the stack if it is the uppermost; whether it was."""
    if not height():
        return False
    mode = pop()
    if mode is SCENE.mode:
        return True
    push(mode)
    return False


class Quiet:
    """A context in which nothing is noted, and functions run as if nobody watched."""

    def __enter__(self) -> None:
        SCENE.quiet += 1
        self.taken = take_mode_away()

    def __exit__(self, *_: object) -> None:
        if self.taken:
            push(SCENE.mode)
        SCENE.quiet -= 1


def meet(kernel: str, run: Callable[[], Any], understood: Callable[[], tuple[Passage, Crossing]]) -> Any:
    """What the caller of a kernel gets: it passes where the call is understood, else runs as it was made and is missed."""
    if not SCENE.live or not watched(kernel):
        return run()
    try:
        with unseen():
            passage, crossing = understood()
    except Exception as error:  # whatever a model hands over, its forward goes on
        result = run()
        missed(kernel, why(error))
        return result
    with Quiet():
        return pass_by(SCENE.watchers.copy(), passage, crossing)


def pass_by(waiting: list[Watcher], passage: Passage, crossing: Crossing) -> Any:
    """What the caller of attention gets, after the watchers of the module that called have met the passage, the last first."""
    while waiting:
        watcher = waiting.pop()
        name = name_for(watcher, passage.module)
        if name is not None:
            return watcher.meet(passage, crossing, name, partial(pass_by, waiting))
    return crossing.run()


def why(error: Exception) -> str:
    """The reason for which a call could not be understood."""
    said = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}".split("\n")[0]
    return said if isinstance(error, UnreadableError) else f"its arguments could not be read ({said})"


def name_for(watcher: Watcher, module: nn.Module | None = None) -> str | None:
    """The name of the innermost module that is running and is the watcher's; None where none is."""
    name = watcher.names.get(id(module))
    for frame in reversed(SCENE.frames) if name is None else ():
        name = watcher.names.get(id(frame.module))
        if name is not None:
            break
    return name


def watched(kernel: str) -> bool:
    """Whether a module that someone watches is running; one whose forward was called by its name is missed."""
    if SCENE.frames:
        return bool(SCENE.frames[-1].watchers) or any(name_for(watcher) is not None for watcher in SCENE.watchers)
    found = called_by_name()
    if found is not None:
        watcher, inside, name = found
        said = f"the module's {name} was called, not the module: write module(...)"
        watcher.miss(Missed(kernel, watcher.names[id(inside)], TRACED if torch.compiler.is_exporting() else said))
    return False


def called_by_name(innermost: nn.Module | None = None) -> tuple[Watcher, nn.Module, str] | None:
    """Return the innermost watched module, but for one, of which a method is running, its watcher and the method's name."""
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
    """Tells every watcher that a call passed which no door understands."""
    for watcher in SCENE.watchers:
        name = name_for(watcher)
        if name is not None:
            watcher.miss(Missed(kernel, name, reason))


def read(mask: Tensor, q: Tensor, k: Tensor) -> Found:
    """The rule, offset and bias of a mask with four axes, found once for all the layers of a forward that share it."""
    return once((mask,), q, k, lambda: of_mask(mask, q, k))


def once(masks: tuple[Tensor | None, ...], q: Tensor, k: Tensor, found: Callable[[], Found], *how: object) -> Found:
    """What masks say together, found once for the same numbers and the same way to read them."""
    key = *how, *(None if m is None else (m.data_ptr(), m.shape, m.stride(), m.dtype) for m in masks), q.shape, k.shape[2]
    result: Found = remember(key, masks, found)
    return result


def remember(key: Any, held: Iterable[Any], found: Callable[[], Any]) -> Any:
    """Return what was found under a key in this forward, found anew where a tensor among those held was written to since."""
    known = SCENE.masks.pop(key, None)
    if known is None or not all(map(is_unchanged, *known[:2])):
        held = list(held)  # kept, so that their memory and their ids are nobody else's
        with torch.no_grad():
            known = held, [fingerprint(x) if isinstance(x, Tensor) else None for x in held], found()
    while len(SCENE.masks) >= MASKS:
        del SCENE.masks[next(iter(SCENE.masks))]
    SCENE.masks[key] = known
    return known[2]


def fingerprint(x: Tensor) -> int | Tensor:
    """Return what changes when x is written to: its version, or a copy of its numbers where torch may not count all writes.

    It counts none in inference mode, and none through numpy. A comparison would make a GPU wait.
    """
    is_counted = x.device.type != "cpu" and not x.is_inference()
    return x._version if is_counted else narrow(x).clone()


def is_unchanged(x: Any, was: int | Tensor | None) -> bool:
    """Return whether a tensor holds the numbers that it held when its fingerprint was taken; anything else does."""
    if was is None:
        return True
    return bool(x._version == was) if isinstance(was, int) else torch.equal(narrow(x), was)


def narrow(x: Tensor) -> Tensor:
    """Return x without the repetitions of axes that are expanded."""
    return x[tuple(slice(None) if stride else slice(1) for stride in x.stride())]
