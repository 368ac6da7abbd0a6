"""The subject of an examination: a module or a function, and each way in which it may be meant to be called."""

import functools
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.errors import ConfigError
from regard.examination.subject.call_conventions import (
    AttentionFunction,
    Form,
    list_signature_conventions,
    list_torch_conventions,
)
from regard.mechanism import Mask
from regard.mechanism.arguments import describe_value
from regard.mechanism.mask_algebra import Offset


@dataclass(frozen=True, eq=False)
class SubjectAdapter:
    """A module or function to examine: call(x), x (b, t, c), or call(q, k, v), each (b, h, t, d), returns its answer.

    `module` holds its weights and its mode, None if there is none. `again` makes the call of a copy of that module, None if the
    module cannot be replaced. `rank` is that of x, or of q, as the subject itself takes it.
    """

    name: str
    module: nn.Module | None
    form: Form
    dtype: torch.dtype
    device: torch.device
    call: AttentionFunction
    again: Callable[[nn.Module], AttentionFunction] | None = None
    rank: int = 3
    note: str = ""  # how the subject is called, in words
    compiled: AttentionFunction | None = None  # the call of the torch.compile version; `call` is that of the original
    has_key_heads: bool = True  # whether keys and values have an axis of heads if queries have one

    @property
    def is_batched(self) -> bool:
        """Whether the subject takes several sequences at once."""
        return self.rank > 2


class SubjectError(Exception):
    """Raised if a subject raises; states its inputs and its error."""

    def __init__(self, given: str, error: Exception) -> None:
        line = (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
        super().__init__(f"{type(error).__name__} on {given}: {line}")
        self.did = f"raised {self}"  # the end of a sentence about the subject


class ShapeChangedError(SubjectError):
    """Raised if a subject returns another shape than it returned before for such inputs."""

    def __init__(self, given: str, shape: tuple[int, ...], before: tuple[int, ...]) -> None:
        Exception.__init__(self, f"{shape} on {given}, expected {before}")
        self.did = f"returned {self}"


def iterate_adapters(subject: object, expects: Mask, offset: Offset = 0) -> Iterator[SubjectAdapter]:
    """Yield a subject for each way in which it may be meant to be called, the likeliest first.

    Raises ConfigError if there is none.
    """
    if isinstance(subject, type):
        raise ConfigError(
            f"examine takes a layer or a function, got the class {subject.__name__}. Make one: {subject.__name__}(...)."
        )
    if not callable(subject):
        raise ConfigError(f"examine takes a module or a function, got {describe_value(subject)}.")
    plain = get_uncompiled(subject)
    module = find_held_module(plain)
    dtype, device = get_dtype_and_device(module)
    for form, rank, note, make, has_key_heads in list_torch_conventions(plain, expects, offset) or list_signature_conventions(
        plain, module, get_subject_name(plain)
    ):
        again = functools.partial(make_call_with_module, plain, module, make) if is_replaceable(plain, module) else None
        compiled = None if plain is subject else make(subject)
        yield SubjectAdapter(
            get_subject_name(plain), module, form, dtype, device, make(plain), again, rank, note, compiled, has_key_heads
        )


def get_uncompiled(subject: Any) -> Any:
    """Return the original of what torch.compile returned, or the subject itself."""
    original = getattr(subject, "_orig_mod", None) or getattr(subject, "_torchdynamo_orig_callable", None)
    return subject if original is None else original


def find_held_module(plain: Any) -> nn.Module | None:
    """Return the module that a callable is or calls: in a partial, a bound method, a closure or a global; None if it has none.

    Several modules are returned as an nn.ModuleList.
    """
    if isinstance(plain, nn.Module):
        return plain
    if isinstance(plain, functools.partial):
        return find_held_module(plain.func)
    held = [
        getattr(plain, "__self__", None),
        *(cell.cell_contents for cell in getattr(plain, "__closure__", None) or () if has_value(cell)),
    ]
    called = getattr(plain, "__code__", None)
    if called is not None:
        held += [plain.__globals__.get(name) for name in called.co_names]
    modules = [one for one in held if isinstance(one, nn.Module)]
    return nn.ModuleList(modules) if len(modules) > 1 else modules[0] if modules else None


def find_module(subject: object) -> nn.Module | None:
    """Return the module that a subject is or calls; None if it has none."""
    return find_held_module(get_uncompiled(subject)) if callable(subject) and not isinstance(subject, type) else None


def has_value(cell: Any) -> bool:
    """Return whether a closure's variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_replaceable(plain: Any, module: nn.Module | None) -> bool:
    """Return whether another module can replace the subject's module."""
    if module is None or plain is module:
        return module is not None
    if isinstance(plain, functools.partial):
        return is_replaceable(plain.func, module)
    return isinstance(plain, (types.FunctionType, types.MethodType))


def make_call_with_module(
    plain: Any, module: nn.Module | None, make: Callable[[Any], AttentionFunction], copy: nn.Module
) -> AttentionFunction:
    """Make the call of a copy of the subject's module, with the arguments that a partial or a function holds in its dtype."""
    return make(replace_module(plain, module, copy))


def replace_module(plain: Any, module: nn.Module | None, copy: nn.Module) -> Any:
    """Return a callable that calls a copy in place of a module: a module, or a partial, method, closure or global of it."""
    if plain is module:
        return copy
    dtype = get_dtype_and_device(copy)[0]
    if isinstance(plain, functools.partial):
        positional = [cast_tensor(one, dtype) for one in plain.args]
        named = {name: cast_tensor(one, dtype) for name, one in plain.keywords.items()}
        return functools.partial(replace_module(plain.func, module, copy), *positional, **named)
    copies = [copy]
    originals = [module]
    if isinstance(module, nn.ModuleList) and isinstance(copy, nn.ModuleList):  # several modules that a function holds
        copies, originals = [*copies, *copy], [*originals, *module]

    def exchange(value: Any) -> Any:
        found = next((new for old, new in zip(originals, copies, strict=True) if old is value), None)
        return cast_tensor(value, dtype) if found is None else found

    if isinstance(plain, types.MethodType):
        return types.MethodType(plain.__func__, exchange(plain.__self__))
    cells = tuple(types.CellType(exchange(cell.cell_contents)) if has_value(cell) else cell for cell in plain.__closure__ or ())
    names = {name: exchange(value) for name, value in plain.__globals__.items() if name in plain.__code__.co_names}
    made = types.FunctionType(plain.__code__, plain.__globals__ | names, plain.__name__, plain.__defaults__, cells)
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def cast_tensor(value: Any, dtype: torch.dtype) -> Any:
    """Return a floating tensor in a dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def get_dtype_and_device(module: nn.Module | None) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of a module's first floating parameter or buffer, else torch's default dtype and the CPU."""
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    first = next((one for one in held if one.is_floating_point()), None)
    return (torch.get_default_dtype(), torch.device("cpu")) if first is None else (first.dtype, first.device)


def get_subject_name(plain: Any) -> str:
    """Return the name of a subject for the report."""
    if isinstance(plain, functools.partial):
        return get_subject_name(plain.func)
    return type(plain).__name__ if isinstance(plain, nn.Module) else getattr(plain, "__qualname__", type(plain).__name__)


def format_module_path(path: str) -> str:
    """Format a module's path as code: blocks[0].attention."""
    return re.sub(r"\.(\d+)", r"[\1]", path)
