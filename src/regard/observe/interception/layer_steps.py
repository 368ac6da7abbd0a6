"""What runs in a module, held until it ends, as a description that shows whether it is what ran in another one."""

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.handwritten.traces import Trace, Traces
from regard.observe.interception.layer_forms import CallForm, FollowedTensor, LayerForm, build_call_form, find_followed
from regard.observe.interception.provenance import PLAIN, ModuleFrame, is_part_of_parameter, is_weight

MOST_ENTRIES = 2**22  # of the results that are held until a module ends
MOST_STEPS = 256
NUMBERS = (int, float, bool, complex)
NAMES = (str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.memory_format, torch.layout)
PLAIN_VALUES = frozenset((*NUMBERS, *NAMES))


class LayerStep(NamedTuple):
    """A function or a child module that ran in a layer, with its arguments and its result."""

    run: Any
    args: Any
    kwargs: Any
    result: Any


class UnknownArgumentError(Exception):
    """An argument is of a type that is not compared."""


def runs_transformed() -> bool:
    """Return whether functions run in autocast or in a transform such as vmap, which a step that is followed later does not."""
    return torch._C._is_any_autocast_enabled() or torch._C._functorch.peek_interpreter_stack() is not None


class LayerSteps:
    """What ran in a module so far, with its tensors by number, in the order in which the steps name them.

    Steps are deferred, not followed, if there are earlier layers (`forms`): until the module ends, or until there are more than
    in any of these. Then they are described, and followed if they differ.
    """

    def __init__(
        self, frame: ModuleFrame, key: Hashable, forms: list[LayerForm], effects: int, follow_step: Callable[[LayerStep], Any]
    ) -> None:
        self.key, self.forms, self.effects, self.follow_step = key, forms, effects, follow_step
        self.module, self.inputs, self.is_deferred = frame.module, frame.input_tensors, bool(forms)
        self.most_steps = max((len(one.description) for one in forms), default=0)
        self.description: list[Hashable] = []
        self.tensors: list[weakref.ref[Tensor]] = []
        self.numbers: dict[int, int] = {}
        self.given: list[int] = []  # the numbers of tensors that the layer did not make
        self.deferred: list[LayerStep] = []
        self.calls: list[CallForm | None] = []  # that were followed, None for one that cannot be repeated
        self.followed: dict[tuple[int, bool], FollowedTensor | None] = {}  # by number, and whether it is used; None likewise
        self.size = 0

    def add(self, step: LayerStep) -> bool:
        """Add a step; return whether it could be, since its arguments can be compared and there is room.

        Steps that were deferred are followed once there are more than in any earlier layer.
        """
        try:
            if not self.is_deferred:
                self.description.append(self.describe_step(step))
            else:
                has_list = list in map(type, step.args)
                copied = step._replace(args=tuple(x.copy() if type(x) is list else x for x in step.args)) if has_list else step
                self.deferred.append(copied)
                if len(self.deferred) > self.most_steps:
                    self.describe_deferred()
                    self.follow()
        except Exception:  # of unusual tensors too, which must not stop the model
            return False
        return self.size <= MOST_ENTRIES and len(self.description) <= MOST_STEPS and not runs_transformed()

    def describe_deferred(self) -> None:
        """Describe the steps that were deferred, all at once, which is faster than one by one between the model's functions."""
        self.description += map(self.describe_step, self.deferred)

    def follow(self) -> None:
        """Follow what was deferred, in order."""
        steps, self.deferred, self.is_deferred = self.deferred, [], False
        with torch._C.DisableTorchFunction():
            for step in steps:
                self.follow_step(step)

    def describe_step(self, step: LayerStep) -> Hashable:
        """Return what a step is, with tensors by their numbers. Raises UnknownArgumentError for other types of arguments."""
        run, args, kwargs, result = step
        if isinstance(run, nn.Module):
            run = type(run), run.training, vars(run).get("p")
        return (
            run,
            self.describe_values(args),
            (*kwargs, self.describe_values(kwargs.values())) if kwargs else None,
            self.describe_result(result) if isinstance(result, Tensor) else tuple(map(self.describe_result, result)),
        )

    def describe_values(self, values: Collection[Any]) -> Hashable:
        """Return arguments in a form that can be compared: their types, and each as it is or a tensor's number."""
        kinds = tuple(map(type, values))
        if self.is_deferred:  # its tensors are alive, or it is followed, so that ids are those of their tensors
            described = tuple(map(self.numbers.get, map(id, values), values))
            if PLAIN_VALUES.issuperset(map(type, described)):
                return kinds, described
        return kinds, tuple(map(self.describe, values))

    def describe(self, x: Any) -> Hashable:
        """Return an argument in a form that can be compared, with its type."""
        kind = type(x)
        if kind in PLAIN:
            number = self.find_number(x)
            return self.describe_given(x) if number is None else number
        if kind in NUMBERS or isinstance(x, NAMES):
            value: Hashable = x
            return value
        if kind is slice:
            return self.describe_values((x.start, x.stop, x.step))
        if isinstance(x, tuple | list):
            return self.describe_values(x)
        if kind is dict:
            return *x, self.describe_values(x.values())
        raise UnknownArgumentError

    def describe_given(self, x: Tensor) -> Hashable:
        """Return what a tensor is that the layer was given or holds, which gets a number."""
        if x.layout is not torch.strided or x.is_nested:
            raise UnknownArgumentError
        place = next((n for n, one in enumerate(self.inputs) if one is x), -1)
        holds = is_part_of_parameter(x), is_weight(self.module, x), place
        self.given.append(self.add_tensor(x))
        return holds, x.shape, x.stride(), x.dtype, x.device

    def describe_result(self, x: Any) -> Hashable:
        """Return the number of a result, a new one if it is not known, and what the arguments need not determine of it."""
        number = self.find_number(x)
        if number is None:
            if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested:
                raise UnknownArgumentError
            number = self.add_tensor(x)
            self.size += x.numel()
        return number, x.shape, x.dtype

    def find_number(self, x: Tensor) -> int | None:
        """Return the number of a tensor; None if it has none yet."""
        number = self.numbers.get(id(x))
        return number if number is not None and self.tensors[number]() is x else None

    def add_tensor(self, x: Tensor) -> int:
        """Return the number that a tensor gets."""
        self.numbers[id(x)] = number = len(self.tensors)
        self.tensors.append(weakref.ref(x))
        return number

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

    def list_tensors(self) -> list[Tensor | None]:
        """Return the tensors by number, None for those that were freed."""
        return [one() for one in self.tensors]
