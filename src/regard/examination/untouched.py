"""A context that leaves no trace: modes, weights, buffers, gradients, attributes and random states are put back."""

import contextlib
import copy
import random
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from regard.errors import ConfigError

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
DEEP = 4  # containers in containers


class Value(NamedTuple):
    """A tensor as it was found: its numbers, None where they were not copied, and what belongs to its gradient."""

    tensor: Tensor
    numbers: Tensor | None
    needs_grad: bool
    grad: Tensor | None


class State(NamedTuple):
    """What a module holds: its containers and those in them, each with a copy, and its tensors."""

    containers: list[tuple[Any, Any]]
    values: list[Value]

    def put_back(self) -> None:
        """Makes it all as it was; what one tensor refuses never stops the rest."""
        for one, before in self.containers:
            refill(one, before)
        for value in self.values:
            with contextlib.suppress(Exception):  # some layouts and subclasses can be neither compared nor written
                put_back(value)


@contextlib.contextmanager
def untouched(module: nn.Module | None, most: int | None = None) -> Iterator[None]:
    """The block sees the module in evaluation mode and hears no warnings; after it everything is as it was found.

    `most` is how many numbers of its tensors are copied at most, the smallest tensors first; None where all are.
    """
    parts = list(module.modules()) if module is not None else []
    refuse(parts)
    dtype, exact = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    with random_states(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        state = state_of(parts, most)
        try:
            for part in parts:
                part.training = False  # module.eval() may be somebody's own
            yield
        finally:
            state.put_back()
            torch.set_default_dtype(dtype)
            torch.set_deterministic_debug_mode(exact)


def refuse(parts: list[nn.Module]) -> None:
    """Raises ConfigError of modules that cannot be kept, or that have no numbers yet."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ConfigError("examine takes no module of torch.jit.script or trace. Examine the module that it was made of.")
    tensors = [one for part in parts for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
    if any(is_lazy(one) for one in tensors):
        raise ConfigError("examine takes a module with weights, and of this one they are made when it is called. Call it once.")
    if any(one.is_meta for one in tensors):
        raise ConfigError('examine takes a module with weights, and those of this one are on the device "meta". Load them.')


def state_of(parts: list[nn.Module], most: int | None) -> State:
    """What modules hold now; `most` as untouched has it."""
    found: dict[int, tuple[Any, Any]] = {}
    for part in parts:
        contained(vars(part), found, DEEP)
    tensors = {id(x): x for _, held in found.values() for x in within(held) if isinstance(x, Tensor)}
    values, total = [], 0
    for x in sorted(tensors.values(), key=Tensor.numel):
        total += x.numel()
        numbers = x.detach().clone() if most is None or total <= most else None
        values.append(Value(x, numbers, x.requires_grad, x.grad if x.is_leaf else None))
    return State(list(found.values()), values)


def contained(value: Any, found: dict[int, tuple[Any, Any]], deep: int) -> None:
    """Adds a container and those in it, each with a copy of what is in it."""
    if type(value) not in CONTAINERS or id(value) in found or not deep:
        return
    found[id(value)] = (value, copy.copy(value))
    for one in within(value):
        contained(one, found, deep - 1)


def within(container: Any) -> list[Any]:
    """What a container holds."""
    return list(container.values()) if isinstance(container, dict) else list(container)


def refill(container: Any, before: Any) -> None:
    """A container holds again what it held."""
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)


def put_back(value: Value) -> None:
    """A tensor's numbers, only where they changed, and what belongs to its gradient."""
    x, numbers = value.tensor, value.numbers
    if numbers is not None and not alike(x, numbers):
        rewrite(x, numbers)
    if not x.is_leaf and not value.needs_grad:
        x.detach_()  # a buffer that was written to with gradients
    if x.is_leaf:
        if x.requires_grad != value.needs_grad:
            x.requires_grad_(value.needs_grad)
        x.grad = value.grad


def alike(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes; False where that cannot be told."""
    if not same_kind(x, other):
        return False
    try:
        one, two = (each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (x, other))
        return torch.equal(one, two)
    except (RuntimeError, NotImplementedError):  # sparse or quantized
        return False


def rewrite(x: Tensor, numbers: Tensor) -> None:
    """Writes a tensor's numbers where they stand; where they cannot be written there, the tensor is given others."""
    with torch.no_grad():
        try:
            if same_kind(x, numbers) and x.layout is torch.strided:
                x.data.copy_(numbers)
                return
        except (RuntimeError, NotImplementedError):  # expanded
            pass
        x.data = numbers.clone()


def same_kind(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape, device and layout."""
    return (x.dtype, x.shape, x.device, x.layout) == (other.dtype, other.shape, other.device, other.layout)


def seeded(seed: int, device: torch.device) -> None:
    """Sets the generators of the CPU and of a device; torch.manual_seed would set those of all devices, used or not."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


@contextlib.contextmanager
def random_states() -> Iterator[None]:
    """Whatever is drawn in the block, torch's generators, Python's and numpy's stand after it where they stood."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)
