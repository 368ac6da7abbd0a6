"""The torch function mode: intercepts the functions that compute attention, and follows attention written out by hand.

A torch function mode sees every call of a torch function in its thread, including functions whose names were bound at import.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode

from regard.observe.interception.call_dispatch import explain_error, report_missed
from regard.observe.interception.function_roles import Role, find_activation_name
from regard.observe.interception.functions.function_wrappers import classify_function
from regard.observe.interception.handwritten.detection import HandwrittenTracker, may_start
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.scores.weight_steps import WeightSteps
from regard.observe.interception.handwritten.softmax.undivided_contexts import UndividedContexts
from regard.observe.interception.handwritten_calls import HandwrittenCalls
from regard.observe.interception.lookups import find_ids
from regard.observe.interception.pixels.pixel_positions import PixelPositions
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.provenance import PARAMETRIZES, ModuleFrame
from regard.observe.interception.skippable import KINDS
from regard.observe.interception.tensor_arguments import list_tensors_by_place
from regard.observe.interception.thread_state import STATE

MADE, SIZE = (Tensor, tuple, list), torch.Size
FAILED = "scores were followed until an operation could not be: {}"
BY_ITSELF = "this kernel was called directly, not through F.scaled_dot_product_attention"


class AttentionFunctionMode(HandwrittenCalls, TorchFunctionMode):
    """A torch function mode that dispatches the attention functions of a thread to their wrappers."""

    def __init__(self) -> None:
        self.frames = STATE.frames  # of the thread that the mode is of
        self.skippable_modules = STATE.skippable_modules
        self.tracker = HandwrittenTracker()
        self.undivided = UndividedContexts()
        self.positions = PixelPositions()
        self.weight_steps = WeightSteps()

    def reset(self, changes_scores: bool) -> None:
        """Clear the followed tensors when a forward starts; `changes_scores` says whether weights may be computed again."""
        self.weight_steps.restart(changes_scores)
        self.tracker.clear()
        self.undivided.clear()
        self.positions.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, frames = kwargs or {}, self.frames
        wrapper = classify_function(func)[0]
        result = wrapper(func, *args, **kwargs) if wrapper is not None and STATE.is_active else func(*args, **kwargs)
        kind = type(result)
        is_made = kind is Tensor or (isinstance(result, MADE) and kind is not SIZE) or func is Tensor.__setitem__
        if not is_made or not frames or not STATE.is_active:
            return result
        with torch._C.DisableTorchFunction():
            return self.follow_step(frames, func, *classify_function(func), args, kwargs, result)

    def follow_child(self, child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Follow a child module that ran, and log it."""
        frames = STATE.frames
        for ids in find_ids(child, args):
            for frame in frames:
                frame.ids.append(ids)
        if len(args) == 1 and not kwargs and id(child) in STATE.skippable_modules and isinstance(args[0], Tensor):
            self.follow_module(frames, child, args[0], output)  # maybe scores of pairs
        log_child(frames[-1], child, args, kwargs, output)

    def follow_step(
        self,
        frames: list[ModuleFrame],
        func: Any,
        wrapper: Any,
        name: str,
        kernel: bool,
        role: Role | None,
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> Any:
        """Follow a function that ran, and log it; return its result."""
        outputs, given = args[0] if result is None else result, (args, kwargs)
        if kwargs or name == "einsum":
            args, kwargs = list_tensors_by_place(name, args, kwargs)
        if self.positions.stored and wrapper is None:
            self.follow_positions(self.positions.follow_function, func, name, args, kwargs, outputs)
        handwritten_call = None
        if self.undivided.notes:
            self.follow_undivided(func, name, args, kwargs, outputs)
        if kernel:
            report_missed(name, BY_ITSELF)
        elif wrapper is None and (may_start(role, name) or self.tracker.may_follow_any(args, kwargs)):
            handwritten_call = self.follow_function(frames, func, name, role, args, kwargs, outputs)
        if handwritten_call is not None and isinstance(result, Tensor):
            result = outputs = self.intercept_handwritten(handwritten_call, result)
        elif self.weight_steps.is_active:
            self.keep_step(func, name, *given, outputs)
        frames[-1].log_operation(args, kwargs, outputs, name)
        return result

    def follow_function(self, frames: Any, func: Any, name: str, *call: Any) -> HandwrittenCall | None:
        """Follow a function; return the call of attention that it completes, or None. A failure must not stop the model."""
        try:
            return self.tracker.follow_function(frames, func, name, *call)
        except Exception as error:
            self.report_failure(name, error)
            return None

    def follow_module(self, frames: list[ModuleFrame], child: nn.Module, x: Tensor, y: Any) -> None:
        """Follow a module that cannot attend. A failure must not stop the model."""
        if self.positions.stored:
            self.follow_positions(self.positions.follow_module, child, x, y)
        try:
            self.tracker.follow_module(frames, child, x, y)
        except Exception as error:
            self.report_failure(type(child).__name__, error)
        if self.weight_steps.is_active:
            self.keep_step(child, type(child).__name__, (x,), {}, y)

    def keep_step(self, *call: Any) -> None:
        """Keep a function between scores and weights. A failure must not stop the model: weights are then not changed."""
        try:
            self.weight_steps.add(self.tracker, *call)
        except Exception:
            self.weight_steps.restart(is_active=False)

    def follow_positions(self, follow: Callable[..., None], *call: Any) -> None:
        """Follow the positions of pixels. A failure must not stop the model: no more positions are known in this forward."""
        try:
            with disable_modes(), torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                follow(*call)
        except Exception:
            self.positions.clear()

    def follow_undivided(self, *call: Any) -> None:
        """Follow the contexts that are not yet divided. A failure must not stop the model: they are reported as they are."""
        try:
            self.undivided.follow_function(*call)
        except Exception:
            self.undivided.contexts.clear()

    def report_failure(self, name: str, error: Exception) -> None:
        """Report that nothing is followed any further in this forward."""
        self.tracker.clear()
        report_missed(f"by hand: {name}", FAILED.format(explain_error(error)))


def log_child(frame: ModuleFrame, child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Log a child of the module that runs."""
    kind: Any = type(child)
    name, has_pattern = describe_class(kind)
    frame.log_operation(args, kwargs, output, name, child=kind)
    shapes = frame.noted[-1].shapes if has_pattern else None
    if shapes is not None and (pattern := getattr(child, "pattern", None)) is not None:
        lengths = dict(vars(child).get("axes_lengths", {}))
        frame.noted[-1] = frame.noted[-1]._replace(shapes=shapes._replace(how=(pattern, lengths)))


@lru_cache(KINDS)
def describe_class(kind: Any) -> tuple[str, bool]:
    """Return the name by which calls of a module class are logged, and whether it rearranges axes by a pattern of einops."""
    name = PARAMETRIZES if kind is ParametrizationList else find_activation_name(kind.__name__)
    return name, kind.__name__ == "Rearrange" and kind.__module__.startswith("einops.")
