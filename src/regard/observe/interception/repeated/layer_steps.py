"""What runs in a module, held until it ends, to see whether it is what ran in another one."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id as backward
from torch._C import _get_tracing_state as tracing
from torch._C import _is_any_autocast_enabled as is_any_autocast_on
from torch._C._functorch import peek_interpreter_stack

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.handwritten.products.traces import Trace, Traces
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.repeated.layer_forms import CallForm, FollowedTensor, LayerForm, build_call_form, find_followed
from regard.observe.interception.repeated.step_description import LayerStep, StepDescriber

MOST_ENTRIES = 2**25  # of the results that are held until a module ends, with views: 12 matrices of 512 tokens have 3 million
MOST_STEPS = 256


def copy_lists(values: Any) -> Any:
    """Return a tuple with copies of its lists, which the model may change."""
    return tuple(x.copy() if type(x) is list else x for x in values)


def runs_transformed() -> bool:
    """Return whether functions run in autocast or in a transform such as vmap, which a step that is followed later does not."""
    return is_any_autocast_on() or peek_interpreter_stack() is not None


def runs_plainly() -> bool:
    """Return whether functions run in no transform, no backward pass and no trace of torch.jit."""
    return backward() == -1 and not is_any_autocast_on() and peek_interpreter_stack() is None and tracing() is None


class LayerSteps(StepDescriber):
    """What ran in a module so far.

    Steps are deferred, not followed, if there are earlier layers (`forms`): until the module ends, or until there are more than
    in any of these. Then they are described, and followed if they differ.
    """

    def __init__(
        self, frame: ModuleFrame, key: Hashable, forms: list[LayerForm], effects: int, follow_step: Callable[[LayerStep], Any]
    ) -> None:
        super().__init__(frame.module, frame.given_tensors)
        self.key, self.forms, self.effects, self.follow_step = key, forms, effects, follow_step
        self.is_deferred = bool(forms)
        self.most_steps = max((len(one.description) for one in forms), default=0)
        self.deferred: list[LayerStep] = []
        self.calls: list[CallForm | None] = []  # that were followed, None for one that cannot be repeated
        self.followed: dict[tuple[int, bool], FollowedTensor | None] = {}  # by number, and whether it is used; None likewise

    def defer(self, run: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Add a step to those that are deferred, if they are; return whether it was, since there is room and it ran plainly.

        Between two functions of the model each line of Python is slow, so this has few.
        """
        if not self.is_deferred or len(self.deferred) >= self.most_steps:
            return False
        if backward() != -1 or is_any_autocast_on() or peek_interpreter_stack() is not None or tracing() is not None:
            return False  # as runs_plainly says
        self.deferred.append((run, copy_lists(args) if list in map(type, args) else args, kwargs, result))
        return True

    def add(self, step: LayerStep) -> bool:
        """Add a step; return whether it could be, since its arguments can be compared and there is room.

        Steps that were deferred are followed once there are more than in any earlier layer.
        """
        try:
            if not self.is_deferred:
                self.describe([step])
            else:
                run, args, kwargs, result = step
                self.deferred.append((run, copy_lists(args), kwargs, result))
                if len(self.deferred) > self.most_steps:
                    self.describe_deferred()
                    self.follow()
        except Exception:  # of unusual tensors too, which must not stop the model
            return False
        return self.size <= MOST_ENTRIES and len(self.description) <= MOST_STEPS and not runs_transformed()

    def describe_deferred(self) -> None:
        """Describe the steps that were deferred, all at once, which is faster than one by one between the model's functions."""
        self.describe(self.deferred)

    def follow(self) -> None:
        """Follow what was deferred, in order."""
        steps, self.deferred, self.is_deferred = self.deferred, [], False
        with torch._C.DisableTorchFunction():
            for step in steps:
                self.follow_step(step)

    def add_call(
        self, frame: ModuleFrame, trace: Trace, call: Any, adapter: CallAdapter, result: Tensor, tables: Sequence[Traces]
    ) -> None:
        """Add a call that was read in the module, and what is followed of it."""
        self.calls.append(build_call_form(frame, self.list_tensors(), trace, call, adapter, self.find_number(result)))
        self.add_followed(tables)

    def add_followed(self, tables: Sequence[Traces]) -> None:
        """Add the tensors that are followed as scores or weights, and those that are followed as used weights."""
        tensors = self.list_tensors()
        for is_used, table in enumerate(tables):
            for x, trace in table.find_all([one for one in tensors if one is not None]):
                number = self.numbers[id(x)]
                self.followed[number, bool(is_used)] = find_followed(number, bool(is_used), trace, tensors)
