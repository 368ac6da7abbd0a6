"""What runs at this moment in this thread: which modules, who watches them, and how a call passes by them.

Each thread has its own scene, so that recordings of two threads do not mix. In a backward pass nothing is noted: what
checkpointing runs again has been seen before.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

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

    def enter(self, module: nn.Module) -> None:
        """A module of its own begins, which no other module of its own called."""

    def meet(self, passage: Passage, crossing: Crossing, name: str, proceed: Proceed) -> Any:
        """A call of attention passes in a module of this name: what the caller gets."""

    def miss(self, missed: Missed) -> None:
        """A call passed that no door understands."""


class Scene(threading.local):
    """This thread's watchers and running modules."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []  # those that change calls last
        self.frames: list[Frame] = []
        self.quiet = 0  # inside a door
        self.mode: Any = None  # of functions, while there are watchers
        self.harmless: dict[int, nn.Module] = {}  # modules of the watched models that cannot attend
        self.passed = False  # inside one of them
        self.compiled: tuple[int, Any] | None = None  # the compiled function that runs, by its frame, and what ends with it
        self.stray = False  # inside a module that was looked at, in a thread without watchers
        self.fast = False  # inside a module of torch's that a mode of functions makes slow, and without it
        self.crosses: bool | None = None  # whether keys of the kernel to come are not of its queries, where a caller knows it
        self.masks: dict[Any, tuple[Any, Any]] = {}  # that this forward has met, and what they say
        self.turned = WeakTensorKeyDictionary()  # keys of a decoder, and the rows of the step before that they are of

    @property
    def live(self) -> bool:
        """Whether what happens is to be noted: not in a backward pass, and not while torch.jit traces."""
        return bool(self.watchers) and not self.quiet and backward() == -1 and tracing() is None


SCENE = Scene()
TRACED = "the model is traced here, and what it computes with are no numbers: record it when it runs"


def begin(module: nn.Module, args: Any, kwargs: Any) -> Frame:
    """A module starts to run; who watches it is told, unless one of its own modules called it."""
    above = SCENE.frames[-1].watchers if SCENE.frames else ()
    if not SCENE.frames:
        SCENE.masks.clear()
        SCENE.mode.forget()
    if len(above) < len(SCENE.watchers):
        new = tuple(one for one in SCENE.watchers if id(module) in one.names and one not in above)
        for watcher in new:
            watcher.enter(module)
        above += new
    frame = Frame(module, above, args, kwargs)
    SCENE.frames.append(frame)
    return frame


def end(frame: Frame) -> None:
    """A module has run, or failed; so have those that it called."""
    frames = SCENE.frames
    if frames and frames[-1] is frame:
        frames.pop()
    elif frame in frames:
        del frames[frames.index(frame) :]
    if not frames:
        SCENE.masks.clear()


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
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        inside = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        for watcher in SCENE.watchers if isinstance(inside, nn.Module) else ():
            if id(inside) in watcher.names:
                name = frame.f_code.co_name
                said = f"the module's {name} was called, not the module: write module(...)"
                said = TRACED if torch.compiler.is_exporting() else said
                watcher.miss(Missed(kernel, watcher.names[id(inside)], said))
                return False
    return False


def missed(kernel: str, reason: str) -> None:
    """Tells every watcher that a call passed which no door understands."""
    for watcher in SCENE.watchers:
        name = name_for(watcher)
        if name is not None:
            watcher.miss(Missed(kernel, name, reason))


def read(mask: Tensor, q: Tensor, k: Tensor) -> Found:
    """The rule, offset and bias of a mask with four axes, found once for all the layers of a forward that share it."""
    return once((mask,), q, k, lambda: of_mask(mask, q, k))


def once(masks: tuple[Tensor | None, ...], q: Tensor, k: Tensor, found: Callable[[], Found]) -> Found:
    """What masks say together, found once."""
    asked = [None if m is None else (m.data_ptr(), m.shape, m.stride(), m.dtype, version(m)) for m in masks]
    key = *asked, q.shape, k.shape[2]
    if key not in SCENE.masks:
        while len(SCENE.masks) >= MASKS:
            del SCENE.masks[next(iter(SCENE.masks))]
        with torch.no_grad():
            SCENE.masks[key] = masks, found()  # the masks are kept, so that their memory is nobody else's
    result: Found = SCENE.masks[key][1]
    return result


def version(x: Tensor) -> int:
    """How often x was written to in place, where torch counts it."""
    return 0 if x.is_inference() else x._version
