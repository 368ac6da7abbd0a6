"""Places in a module's code: what its parts and functions are given and return, read or replaced while the module runs."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, MissingNameError, ShapeError
from regard.mechanism.arguments import describe_value
from regard.observe.interception.thread_state import InterceptionPause

Name = str | tuple[str, Callable[[Tensor], Tensor]]  # of a place, with what selects a view of the tensor
Scope = dict[str, Any]  # the attributes of a module, or the globals of its code
ABSENT = object()
INTERNAL = vars(nn.Module()).keys() - {"training"}  # the attributes that torch keeps of every module


@dataclass(frozen=True)
class Place:
    """A tensor that a module's code passes: what a part of it, a method or a function returns, or one of its arguments.

    name is the path of a submodule, the path of one of its methods, or the name of a function that the code of the module or
    of a submodule calls. argument is the name of an argument; None for what is returned, the first tensor if there are more.
    `select` returns the view of the tensor that is meant.
    """

    name: str
    argument: str | None = None
    select: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, name: str, given: Any) -> "Place":
        """Return the place that a text "name" or "name:argument" states, alone or in a pair with a function."""
        text, select = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if not isinstance(text, str) or not (select is None or callable(select)):
            raise ConfigError(
                f"{name} must be 'part', 'function' or 'function:argument', or a pair of this and a function that selects a "
                f"view of the tensor; got {describe_value(given)}."
            )
        path, _, argument = text.partition(":")
        return cls(path, argument or None, select)

    def __str__(self) -> str:
        return (self.name or "the module") + (f":{self.argument}" if self.argument else "")

    def find(self, x: Tensor) -> Tensor:
        """Return the selected view of a tensor at this place."""
        found = x if self.select is None else self.select(x)
        if not isinstance(found, Tensor):
            raise ConfigError(f"what selects a view of {self} must return a tensor, got {describe_value(found)}.")
        return found


class Tokens(NamedTuple):
    """The batch rows and the tokens of the inputs of a module, and whether they have a batch axis."""

    b: int
    t: int
    is_batched: bool


def find_tokens(inputs: Sequence[Any]) -> Tokens:
    """Return the sizes of the first tensor among inputs: ids (b, t) or (t,), or tokens (b, ..., t, c) or (t, c)."""
    x = next((x for x in inputs if isinstance(x, Tensor)), None)
    axis = 1 if x is None or not x.is_floating_point() else 2  # of the tokens, from the last
    if x is None or x.is_nested or x.layout is not torch.strided or x.dim() < axis or not x.numel():
        raise ConfigError(f"inputs must begin with token ids (b, t) or tokens (b, t, c), got {describe_value(x)}.")
    is_batched = x.dim() > axis
    return Tokens(x.shape[0] if is_batched else 1, x.shape[-axis], is_batched)


@dataclass(frozen=True)
class TokenLayout:
    """Which axis of tensors of a shape (b n, ..., t, ...) holds tokens, to convert them to (b, t, c) and back."""

    shape: torch.Size  # (b, n, ...)
    axis: int
    is_batched: bool

    @classmethod
    def from_tensor(cls, x: Tensor, tokens: Tokens) -> "TokenLayout":
        """Find the axis of the tokens. Raises ShapeError if there is none, or several, or no batch of these rows."""
        (b, t, is_batched), given = tokens, tuple(x.shape)
        if is_batched and (not x.dim() or x.shape[0] % b):
            raise ShapeError(f"its shape {given} does not begin with the {b} rows of the batch")
        shape = (x.unflatten(0, (b, -1)) if is_batched else x[None, None]).shape
        axes = [axis for axis in range(1, len(shape)) if shape[axis] == t]
        if len(axes) != 1:
            raise ShapeError(f"{len(axes)} axes of its shape {given} have the length {t} of the tokens, not one")
        return cls(shape, axes[0], is_batched)

    def read(self, x: Tensor) -> Tensor:
        """Return a tensor as (b, t, c)."""
        return x.reshape(self.shape).movedim(self.axis, 1).flatten(2)

    def write(self, rows: Tensor) -> Tensor:
        """Return rows (b, t, c) in the shape of the tensor."""
        b, t, *others = torch.empty(self.shape, device="meta").movedim(self.axis, 1).shape
        x = rows.reshape(b, t, *others).movedim(1, self.axis)
        return x.flatten(0, 1) if self.is_batched else x[0, 0]


@dataclass(eq=False)
class RepeatedModule:
    """A module that runs again and again on the same inputs from the same state, with tensors read and replaced on the way."""

    module: nn.Module
    inputs: tuple[Any, ...]

    def run(
        self, places: Sequence[Place], source: Place | None = None, change: Callable[[Tensor], Tensor] | None = None
    ) -> dict[Place, list[Tensor]]:
        """Run the module and return the tensors at some places, of each call in order; `change` replaces that of a source.

        Its attributes, buffers and the random state are as before afterwards, and the inputs are copied.
        """
        found: dict[Place, list[Tensor]] = {}

        def pass_tensor(place: Place, x: Tensor) -> Tensor:
            if place == source and change is not None:
                x = change(x)
            if isinstance(x, Tensor):
                found.setdefault(place, []).append(x.detach().clone())
            return x

        by_name: dict[str, list[Place]] = {}
        for place in dict.fromkeys([*places, *([] if source is None else [source])]):
            by_name.setdefault(place.name, []).append(place)
        scopes = [
            (scope, key, wrap_function(function, own, pass_tensor))
            for name, own in by_name.items()
            for scope, key, function in find_scopes(self.module, name)
        ]
        with InterceptionPause(), torch.no_grad(), keep_state(self.module), patch_scopes(scopes):
            self.module(*map(copy_input, self.inputs))
        return found

    def list_outputs(self, kinds: tuple[type[nn.Module], ...]) -> list[Place]:
        """Return the places of the outputs of the submodules of some classes."""
        return [Place(path) for path, part in self.module.named_modules() if path and isinstance(part, kinds)]

    def list_inputs(self) -> list[Place]:
        """Return the places of the first arguments of all submodules."""
        parts = [(path, list(inspect.signature(part.forward).parameters)) for path, part in self.module.named_modules() if path]
        return [Place(path, names[0]) for path, names in parts if names]


def find_scopes(module: nn.Module, name: str) -> list[tuple[Scope, str, Any]]:
    """Return where a part, a method or a function is looked up by name: scopes, the key in each, and what it holds."""
    modules = dict(module.named_modules())
    if name in modules:
        return [(modules[name].__dict__, "forward", modules[name].forward)]
    path, _, method = name.rpartition(".")
    own = getattr(modules[path], method, None) if path in modules else None
    if inspect.isroutine(own):
        return [(modules[path].__dict__, method, own)]
    kinds = {kind for one in modules.values() for kind in type(one).__mro__ if "forward" in vars(kind)}
    codes = [inspect.unwrap(vars(kind)["forward"]) for kind in kinds if not kind.__module__.startswith("torch.")]
    scopes = {id(code.__globals__): code.__globals__ for code in codes if inspect.isfunction(code)}
    found = [(scope, name, scope[name]) for scope in scopes.values() if inspect.isroutine(scope.get(name))]
    if not found:
        raise MissingNameError(
            f"{type(module).__name__} has no part or method {name!r}, and its code calls no function of this name. Its parts "
            f"are {', '.join(map(repr, [path for path in modules if path][:12])) or 'none'}."
        )
    return found


def wrap_function(function: Any, places: Sequence[Place], pass_tensor: Callable[[Place, Any], Any]) -> Callable[..., Any]:
    """Return a function whose arguments and result pass through `pass_tensor` at some places."""
    signature = inspect.signature(function)
    for place in places:
        if place.argument is not None and place.argument not in signature.parameters:
            raise MissingNameError(f"{place.name or 'forward'} has no argument {place.argument!r}, but {signature}.")

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for place in places:
            if place.argument in bound.arguments:
                bound.arguments[place.argument] = pass_tensor(place, bound.arguments[place.argument])
        result = function(*bound.args, **bound.kwargs)
        for place in places:
            result = pass_result(place, result, pass_tensor) if place.argument is None else result
        return result

    return call


def pass_result(place: Place, result: Any, pass_tensor: Callable[[Place, Any], Any]) -> Any:
    """Return a result of which the first tensor has passed through `pass_tensor`."""
    if isinstance(result, tuple | list):
        entries = list(result)
        number = next((n for n, x in enumerate(entries) if isinstance(x, Tensor)), None)
        if number is None:
            return result
        entries[number] = pass_tensor(place, entries[number])
        return entries if isinstance(result, list) else tuple(entries) if type(result) is tuple else type(result)(*entries)
    if isinstance(result, dict):
        key = next((key for key, x in result.items() if isinstance(x, Tensor)), None)
        if key is not None:
            result[key] = pass_tensor(place, result[key])
        return result
    return pass_tensor(place, result) if isinstance(result, Tensor) else result


@contextmanager
def patch_scopes(patches: Sequence[tuple[Scope, str, Any]]) -> Iterator[None]:
    """Set names in scopes while the context is active."""
    before = [(scope, key, scope.get(key, ABSENT)) for scope, key, _ in patches]
    try:
        for scope, key, new in patches:
            scope[key] = new
        yield
    finally:
        for scope, key, old in reversed(before):
            if old is ABSENT:
                scope.pop(key, None)
            else:
                scope[key] = old


@contextmanager
def keep_state(module: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of a module and its parts, and the random state, when the context ends."""
    scopes: list[Scope] = [scope for one in module.modules() for scope in (vars(one), one._buffers)]
    before = [{key: (x, copy_contents(x)) for key, x in scope.items() if key not in INTERNAL} for scope in scopes]
    with torch.random.fork_rng({x.device for x in module.parameters() if x.is_cuda}):
        try:
            yield
        finally:
            for scope, saved in zip(scopes, before, strict=True):
                for key in scope.keys() - saved.keys() - INTERNAL:
                    del scope[key]
                for key, (x, contents) in saved.items():
                    scope[key] = x
                    restore_contents(x, contents)


def copy_contents(x: Any) -> Any:
    """Return a copy of what a tensor, a list or a dictionary holds; None for anything else."""
    return x.detach().clone() if isinstance(x, Tensor) else x.copy() if isinstance(x, list | dict) else None


def restore_contents(x: Any, contents: Any) -> None:
    """Write what `copy_contents` returned back, if it has changed."""
    if isinstance(x, Tensor) and not torch.equal(x, contents):
        x.detach().copy_(contents)
    elif isinstance(x, list):
        x[:] = contents
    elif isinstance(x, dict):
        x.clear()
        x.update(contents)


def copy_input(x: Any) -> Any:
    """Return a copy of an input of a module."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if type(x) in (list, tuple):
        return type(x)(map(copy_input, x))
    return {key: copy_input(value) for key, value in x.items()} if type(x) is dict else copy.deepcopy(x)
