"""Save and restore the state of modules: modes, weights, buffers, gradients, attributes, and random states."""

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
MAX_DEPTH = 4  # levels of nested containers
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their number of bytes
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # the attributes of every nn.Module


class SavedTensor(NamedTuple):
    """A saved tensor: its numbers, None if they were not copied, and its gradient attributes."""

    tensor: Tensor
    numbers: Tensor | None
    needs_grad: bool
    grad: Tensor | None


class SavedState(NamedTuple):
    """What a module holds: its containers, nested ones too, each with a copy, and its tensors."""

    containers: list[tuple[Any, Any]]
    values: list[SavedTensor]

    def restore(self) -> None:
        """Restore everything; a tensor that cannot be restored does not stop the rest."""
        for one, before in self.containers:
            refill_container(one, before)
        for value in self.values:
            with contextlib.suppress(Exception):  # some layouts and subclasses can be neither compared nor written
                restore_tensor(value)


@contextlib.contextmanager
def preserve_state(module: nn.Module | None, most: int | None = None) -> Iterator[None]:
    """Run the block with the module in evaluation mode and without warnings, and restore everything afterwards.

    `most` is how many numbers of its tensors are copied at most, the smallest tensors first; None copies all.
    """
    parts = list(module.modules()) if module is not None else []
    check_modules(parts)
    dtype, debug_mode = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    with preserve_random_states(), warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        state = save_state(parts, most)
        try:
            for part in parts:
                part.training = False  # not module.eval(), which may be overridden
            yield
        finally:
            state.restore()
            torch.set_default_dtype(dtype)
            torch.set_deterministic_debug_mode(debug_mode)


def check_modules(parts: list[nn.Module]) -> None:
    """Raise ConfigError for modules that cannot be saved, or whose weights do not exist yet."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ConfigError("examine takes no module from torch.jit.script or trace. Examine the module that it was made of.")
    tensors = [one for part in parts for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))]
    if any(is_lazy(one) for one in tensors):
        raise ConfigError("examine takes a module with weights, but these are created in the first call. Call it once.")
    if any(one.is_meta for one in tensors):
        raise ConfigError('examine takes a module with weights, but these are on the device "meta". Load them.')


def save_state(parts: list[nn.Module], most: int | None) -> SavedState:
    """Save what modules hold now; `most` as in `preserve_state`."""
    containers: dict[int, tuple[Any, Any]] = {}
    for part in parts:
        collect_containers(vars(part), containers, MAX_DEPTH)
    tensors = {id(x): x for _, held in containers.values() for x in list_values(held) if isinstance(x, Tensor)}
    values, total = [], 0
    for x in sorted(tensors.values(), key=Tensor.numel):
        total += x.numel()
        numbers = x.detach().clone() if most is None or total <= most else None
        values.append(SavedTensor(x, numbers, x.requires_grad, x.grad if x.is_leaf else None))
    return SavedState(list(containers.values()), values)


def collect_containers(value: Any, containers: dict[int, tuple[Any, Any]], levels: int) -> None:
    """Add a container and the containers in it to `found`, each with a shallow copy, down to `deep` levels.

    The attributes of an object of a user's class are a container, too.
    """
    attributes = get_attributes(value)
    value = value if attributes is None else attributes
    if type(value) not in CONTAINERS or id(value) in containers or not levels:
        return
    containers[id(value)] = (value, copy.copy(value))
    for one in list_values(value):
        collect_containers(one, containers, levels - 1)


def get_attributes(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class, which is no module; None for anything else."""
    if isinstance(value, (nn.Module, Tensor, type)) or is_of_library(type(value)):
        return None
    return getattr(value, "__dict__", None)


def is_of_library(kind: type) -> bool:
    """Return whether a class is one of torch's or of Python's own library."""
    return kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy")


def list_values(container: Any) -> list[Any]:
    """Return the values in a container."""
    return list(container.values()) if isinstance(container, dict) else list(container)


def refill_container(container: Any, before: Any) -> None:
    """Restore the contents of a container."""
    container.clear()
    container.extend(before) if isinstance(container, (list, deque)) else container.update(before)


def restore_tensor(value: SavedTensor) -> None:
    """Restore a tensor's numbers, only if they changed, and its gradient attributes."""
    x, numbers = value.tensor, value.numbers
    if numbers is not None and not is_identical(x, numbers):
        write_numbers(x, numbers)
    if not x.is_leaf and not value.needs_grad:
        x.detach_()  # a buffer that was written to with gradients enabled
    if x.is_leaf:
        if x.requires_grad != value.needs_grad:
            x.requires_grad_(value.needs_grad)
        x.grad = value.grad


def is_identical(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes; False if they cannot be compared."""
    if not has_same_kind(x, other):
        return False
    try:
        bits = INTEGERS.get(x.dtype.itemsize, torch.uint8)
        one, two = (each.detach().reshape(-1).contiguous().view(bits) for each in (x, other))
        return torch.equal(one, two)
    except (RuntimeError, NotImplementedError):  # sparse or quantized
        return False


def write_numbers(x: Tensor, numbers: Tensor) -> None:
    """Write a tensor's numbers in place; if that fails, give the tensor new storage."""
    with torch.no_grad():
        try:
            if has_same_kind(x, numbers) and x.layout is torch.strided:
                x.data.copy_(numbers)
                return
        except (RuntimeError, NotImplementedError):  # expanded
            pass
        x.data = numbers.clone()


def has_same_kind(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape, device and layout."""
    return (x.dtype, x.shape, x.device, x.layout) == (other.dtype, other.shape, other.device, other.layout)


class Snapshot(NamedTuple):
    """The attributes of each part of a module, the containers in them and the tensors in both; no weights."""

    attributes: list[tuple[str, nn.Module, dict[str, Any]]]
    containers: list[tuple[Any, Any]]
    values: list[SavedTensor]

    def restore(self, numbers: bool = True) -> None:
        """Restore attributes, containers and, with `numbers`, tensor values; hooks, modes and weights stay as they are."""
        for _, part, before in self.attributes:
            for name in vars(part).keys() - MODULE_ATTRIBUTES - before.keys():
                del vars(part)[name]
            vars(part).update(before)
        for one, before in self.containers:
            refill_container(one, before)
        for value in self.values if numbers else ():
            restore_tensor(value)

    def list_changes(self) -> list[str]:
        """Return the names of the attributes and buffers that have changed."""
        numbers = {id(value.tensor): value.numbers for value in self.values}
        contents = {id(one): before for one, before in self.containers}

        def is_changed(now: Any, before: Any) -> bool:
            if now is not before:
                return True
            attributes = get_attributes(now)
            now = now if attributes is None else attributes
            held = contents.get(id(now))
            if held is not None:
                return len(held) != len(now) or any(map(is_changed, list_values(now), list_values(held)))
            value = numbers.get(id(now))
            return value is not None and not is_identical(now, value)

        return [
            f"{path}.{name}" if path else name
            for path, part, before in self.attributes
            for table, held in ((vars(part), before), (part._buffers, contents[id(part._buffers)]))
            for name in sorted((table.keys() | held.keys()) - MODULE_ATTRIBUTES)
            if is_changed(table.get(name), held.get(name))
        ]


def take_snapshot(module: nn.Module) -> Snapshot:
    """Save what a module keeps now."""
    attributes = [
        (path, part, {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES})
        for path, part in module.named_modules()
    ]
    found: dict[int, tuple[Any, Any]] = {}
    for _, part, held in attributes:
        for one in (part._buffers, *held.values()):
            collect_containers(one, found, MAX_DEPTH - 1)
    every = [x for _, _, held in attributes for x in held.values()] + [x for one, _ in found.values() for x in list_values(one)]
    tensors = {id(x): x for x in every if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)}
    values = [SavedTensor(x, x.detach().clone(), x.requires_grad, None) for x in tensors.values() if x.is_leaf]
    return Snapshot(attributes, list(found.values()), values)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of one device; torch.manual_seed would seed those of all devices, used or not."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def read_random_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of torch's generators of the CPU and of one device, of Python's and of NumPy's, to be compared."""
    states = [torch.default_generator.get_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    numpy = sys.modules.get("numpy")
    _, words, *rest = (None, None) if numpy is None else numpy.random.get_state()
    return (*(state.numpy().tobytes() for state in states), random.getstate(), words is not None and words.tobytes(), rest)


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore torch's, Python's and NumPy's random states after the block."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
