"""Modules that cannot attend, according to their code: neither they nor their parts need interception while they run.

Attention takes a kernel, or products and a softmax. A module cannot attend if its forward, and every function that it calls,
can be read and names none of these.
"""

import builtins
import dis
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from regard.observe.interception.function_roles import MULTIPLIES, NORMALISES
from regard.observe.interception.recurrent.token_mixers import can_mix_tokens

ATTENDS = re.compile("attention|attn|sdpa|flash|mha|kernel|^_?ops$|apply|eval|exec|getattr|import|forward|call")
STEPS = MULTIPLIES | NORMALISES | {"sum", "@", "@="}  # of handwritten attention
PRODUCTS = "regard.matmul."
KINDS = 1024  # cached classes; bounded, so that classes made at run time can be freed
GLOBAL, ATTRIBUTE, IMPORTS = {"LOAD_GLOBAL", "LOAD_NAME"}, {"LOAD_ATTR", "LOAD_METHOD"}, {"IMPORT_NAME"}


def find_skippable(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return the modules of a model that cannot attend, by id. `modules` must be ordered from the outermost inwards."""
    modules_by_id: dict[int, nn.Module] = {}
    for module in reversed(list(modules)):
        kind: Any = type(module)
        names, own = find_used_attributes(kind), vars(module)
        if names is None or "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            continue
        if can_mix_tokens(module):  # to be reported if it is not read
            continue
        parts = [id(part) for part in module._modules.values() if part is not None]
        functions = [own[name] for name in own.keys() & names if callable(own[name])]
        if modules_by_id.keys() >= {*parts} and all(map(is_trusted, functions)):
            modules_by_id[id(module)] = module
    return modules_by_id


@lru_cache(KINDS)
def find_used_attributes(kind: Any) -> frozenset[str] | None:
    """Return the attributes that the forward of a module class uses; None if it may attend or calls unreadable code."""
    if kind.__call__ is not nn.Module.__call__ or kind.__getattr__ is not nn.Module.__getattr__:
        return None
    attributes: set[str] = set()
    queue, read = [kind.forward], set[Any]()
    while queue:
        function = queue.pop()
        if not isinstance(function, FunctionType) or function.__closure__:
            return None
        read.add(function)
        called: Any = None
        for operation, name in find_loaded_names(function.__code__):
            if name == "apply" and is_autograd_function(called):
                queue += {called.forward, called.setup_context} - read
                continue
            if operation in GLOBAL:
                called = function.__globals__.get(name, getattr(builtins, name, None))
                if is_autograd_function(called):
                    continue  # its apply is read
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


def is_autograd_function(value: Any) -> bool:
    """Return whether a value is a class of functions with a gradient of their own, whose `apply` calls its `forward`."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def find_loaded_names(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield the names that code loads, each with its operation, including those of nested functions."""
    for step in dis.get_instructions(code):
        if step.opname in GLOBAL | ATTRIBUTE | IMPORTS:
            yield step.opname, str(step.argval)
        elif step.opname == "BINARY_OP":
            yield step.opname, step.argrepr
        elif isinstance(step.argval, CodeType):
            yield from find_loaded_names(step.argval)


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
    return isinstance(value, int | float | str | tuple | None)
