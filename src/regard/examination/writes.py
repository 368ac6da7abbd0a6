"""Detect what a subject changes in place, in the tensors that it is given or that it holds, and restore them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.examination.report import Finding
from regard.examination.subjects import uncompiled
from regard.examination.untouched import alike, rewrite

MOST = 2**25  # the most numbers of a tensor to copy
CURE = "x = x + y where x += y stands, x.mul(s) for x.mul_(s); or clone what is changed. Its caller may need it later."


class Held(NamedTuple):
    """A tensor that a function holds, and a copy of its numbers."""

    name: str
    tensor: Tensor
    numbers: Tensor


class Writes:
    """The names of what a subject changed in its calls, and the tensors that it holds besides its module."""

    def __init__(self, plain: Any) -> None:
        tensors = {id(one): (name, one) for name, one in find_held(plain) if one.numel() <= MOST}
        self._held = [Held(name, one, one.detach().clone()) for name, one in tensors.values()]
        self.changed: dict[str, None] = {}  # in the order of their first change

    def watch(self, call: Callable[..., Any], names: str = "") -> Callable[..., Any]:
        """Return a call that passes copies of its inputs, and notes which of them, or of the held tensors, it changes."""

        def watched(*inputs: Tensor) -> Any:
            self.put_back()
            given = [one.clone() for one in inputs]
            returned = call(*given)
            said = names.split() or ("x" if len(inputs) == 1 else "q k v").split()
            pairs = [*zip(said, given, inputs, strict=True), *self._held]
            self.changed |= {name: None for name, one, before in pairs if not alike(one, before)}
            return returned

        return watched

    def put_back(self) -> None:
        """Restore the held tensors."""
        for one in self._held:
            if not alike(one.tensor, one.numbers):
                rewrite(one.tensor, one.numbers)

    def find(self) -> Iterator[Finding]:
        """Yield the finding of what was changed, if anything was."""
        if self.changed:
            told = f"it changes tensors of its caller in place: {', '.join(self.changed)}"
            yield Finding("changed input", told, CURE, 1.1, "writes")


@contextlib.contextmanager
def watching(subject: Any) -> Iterator[Writes]:
    """Create the Writes of a subject for the block, and restore the tensors that the subject holds afterwards."""
    writes = Writes(uncompiled(subject))
    try:
        yield writes
    finally:
        writes.put_back()


def find_held(plain: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function holds, by name: of a partial, its defaults, its closure, and globals that it names."""
    if isinstance(plain, nn.Module):
        return
    if isinstance(plain, functools.partial):
        yield from find_held(plain.func)
        named = [(f"argument {n}", one) for n, one in enumerate(plain.args)] + list(plain.keywords.items())
    else:
        named = find_named(getattr(plain, "__func__", plain))
    yield from ((name, one) for name, one in named if isinstance(one, Tensor))


def find_named(function: Any) -> list[tuple[str, Any]]:
    """Return the names and values that a Python function can access."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    found = [(name, function.__globals__.get(name)) for name in code.co_names]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:  # the variable has no value yet
            continue
    defaults = function.__defaults__ or ()
    found += zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    return [*found, *(function.__kwdefaults__ or {}).items()]
