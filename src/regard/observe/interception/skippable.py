"""Modules that cannot attend, according to their code: neither they nor their parts need interception while they run.

Attention takes a kernel, or products and a softmax. A module cannot attend if its forward, and every function that it calls,
can be read and names none of these.
"""

import builtins
import dis
import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.observe.interception.function_roles import MULTIPLIES, NORMALISES
from regard.observe.interception.recurrent.token_mixers import can_mix_tokens

ATTENDS = re.compile("attention|attn|sdpa|flash|mha|kernel|^_?ops$|apply|eval|exec|getattr|import|forward|call")
STEPS = MULTIPLIES | NORMALISES | {"sum", "@", "@="}  # of handwritten attention
PRODUCTS = "regard.matmul."
KINDS = 1024  # cached classes; bounded, so that classes made at run time can be freed
GLOBAL, IMPORTS, APPLY = {"LOAD_GLOBAL", "LOAD_NAME"}, {"IMPORT_NAME"}, "apply of a global"
ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
PARTS = {"_modules", "_parameters", "_buffers"}  # of a module, which are checked one by one
VALUES = {int, float, bool, str, type(None)}  # that are compared
INERT = {  # classes of values that have no code of a user
    *(int, float, bool, str, bytes, type(None), Tensor, nn.Parameter),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
}


def find_skippable(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return the modules of a model that cannot attend, by id. `modules` must be ordered from the outermost inwards."""
    modules_by_id: dict[int, nn.Module] = {}
    classes: dict[Any, ReadClass] = {}
    for module in reversed(list(modules)):
        kind: Any = type(module)
        if kind not in classes:
            classes[kind] = read_current_class(kind)
        names, own = classes[kind].attributes, vars(module)
        if names is None or "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            continue
        if can_mix_tokens(module):  # to be reported if it is not read
            continue
        if module._modules and any(id(one) not in modules_by_id for one in module._modules.values() if one is not None):
            continue
        if holds_inert_values(module, names):
            modules_by_id[id(module)] = module
    return modules_by_id


class ReadClass(NamedTuple):
    """A module class whose code was read: the attributes that its forward uses, but PARTS, and its globals at that time."""

    attributes: frozenset[str] | None
    forward: Any
    loaded: list[tuple[dict[str, Any], str, Any]]


def read_current_class(kind: Any) -> ReadClass:
    """Read the code of a module class, or return what was read before if no function that it calls was replaced."""
    found = read_class(kind)
    if found.forward is not kind.forward or any(names.get(name) is not value for names, name, value in found.loaded):
        read_class.cache_clear()  # a function was replaced
        found = read_class(kind)
    return found


@lru_cache(KINDS)
def read_class(kind: Any) -> ReadClass:
    """Read the code of a module class."""
    loaded: list[tuple[dict[str, Any], str, Any]] = []
    attributes = read_attributes(kind, loaded)
    return ReadClass(None if attributes is None else attributes - PARTS, kind.forward, loaded)


def read_attributes(kind: Any, loaded: list[tuple[dict[str, Any], str, Any]]) -> frozenset[str] | None:
    """Return the attributes that the forward of a module class uses; None if it may attend or calls unreadable code.

    Append the globals that the code loads to `loaded`.
    """
    if kind.__call__ is not nn.Module.__call__ or kind.__getattr__ is not nn.Module.__getattr__:
        return None
    attributes: set[str] = set()
    queue, read = [kind.forward], set[Any]()
    while queue:
        function = queue.pop()
        if not isinstance(function, FunctionType) or function.__closure__ or not all(map(is_trusted, list_defaults(function))):
            return None
        read.add(function)
        for operation, name in list_loaded_names(function.__code__):
            if operation == APPLY or operation in GLOBAL:
                loaded.append((function.__globals__, name, function.__globals__.get(name)))
                called: Any = function.__globals__.get(name, getattr(builtins, name, None))
                if operation == APPLY:
                    if not calls_forward(called):
                        return None
                    queue += {called.forward, called.setup_context} - read
                    continue
                if isinstance(called, FunctionType) and not is_of_torch(called):
                    queue += {called} - read  # whatever its name
                    continue
            if not is_allowed_name(name) or operation in IMPORTS:
                return None
            if operation == "BINARY_OP":
                continue
            if operation not in GLOBAL:
                attributes.add(name)
                called = inspect.getattr_static(kind, name, None)
                called = called.fget if isinstance(called, property) else called
                if called is None or called is vars(nn.Module).get(name):
                    continue
            if isinstance(called, FunctionType) and not is_trusted(called):
                queue += [called] if called not in read else []
            elif not is_trusted(called):
                return None
    return frozenset(attributes)


def list_defaults(function: FunctionType) -> list[Any]:
    """Return the default values of a function's arguments."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def calls_forward(value: Any) -> bool:
    """Return whether a value is a class of functions with a gradient of their own, whose `apply` calls its `forward`."""
    base = torch.autograd.Function
    return (
        isinstance(value, type)
        and issubclass(value, base)
        and inspect.getattr_static(value, "apply") is inspect.getattr_static(base, "apply")
    )


def holds_inert_values(module: nn.Module, names: frozenset[str]) -> bool:
    """Return whether what a module and its parts hold under these names cannot attend, nor methods of the parts."""
    if not module._modules:
        queue = [*map(vars(module).get, names)]  # None, which is inert, for one that it does not have
    else:
        parts = list_parts(module)
        if any(names & list_methods(kind) for kind in {*map(type, parts[1:])}):
            return False
        queue = [value for part in parts for value in map(vars(part).get, names)]
    if INERT.issuperset(map(type, queue)):
        return True
    visited = set[int]()
    while queue:
        value = queue.pop()
        if is_trusted(value) or id(value) in visited:
            continue
        visited.add(id(value))
        kind: Any = type(value)
        if callable(value) or names & list_methods(kind):
            return False
        if isinstance(value, list | tuple | set | frozenset | dict):
            queue += value.values() if isinstance(value, dict) else value
        own = getattr(value, "__dict__", {})
        queue += [own[name] for name in names & own.keys()]
    return True


def list_parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and all its parts, some of them twice if it has them twice."""
    parts = [module]
    for part in parts:
        if part._modules:
            parts += [one for one in part._modules.values() if one is not None]
    return parts


@lru_cache(KINDS)
def list_methods(kind: Any) -> frozenset[str]:
    """Return the names of a class under which there is code that may attend."""
    members = [member for one in kind.__mro__ if not is_of_torch(one) for member in vars(one).items()]
    return frozenset(name for name, value in members if not is_trusted(value)) - vars(nn.Module).keys()


def list_loaded_names(code: CodeType) -> list[tuple[str, str]]:
    """Return the names that code loads, each with its operation, including those of nested functions."""
    names: list[tuple[str, str]] = []
    before = ""
    for step in dis.get_instructions(code):
        if step.opname == "EXTENDED_ARG":
            continue
        if step.opname in ATTRIBUTE and step.argval == "apply" and before in GLOBAL:
            names[-1] = APPLY, names[-1][1]
        elif step.opname in GLOBAL | ATTRIBUTE | IMPORTS:
            names.append((step.opname, str(step.argval)))
        elif step.opname == "BINARY_OP":
            names.append((step.opname, step.argrepr))
        elif isinstance(step.argval, CodeType):
            names += list_loaded_names(step.argval)
        before = step.opname
    return names


def is_allowed_name(name: str) -> bool:
    """Return whether a name is not one that attention is made of."""
    return name not in STEPS and not ATTENDS.search(name)


def is_of_torch(value: Any) -> bool:
    """Return whether a function or class belongs to Python, torch or `regard.matmul`."""
    place = str(value.__module__)
    return place.split(".")[0] in ("torch", "math", "builtins") or place.startswith(PRODUCTS)


def is_trusted(value: Any) -> bool:
    """Return whether a value cannot attend.

    It belongs to Python, torch or `regard.matmul` and has no name of attention, or is not callable code.
    """
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] in ("torch", "math")
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return is_of_torch(value) and is_allowed_name(value.__name__)
    return all(map(is_trusted, value)) if type(value) is tuple else type(value) in INERT
