"""Detect what a subject changes in place, in the tensors that it is given or that it holds, and restore them."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.examination.report import Finding
from regard.examination.subject.adapters import get_uncompiled
from regard.examination.subject.restore_state import is_identical, write_numbers

MOST = 2**25  # the most numbers of a tensor to copy
CURE = (
    "Write x = x + y instead of x += y, x.mul(s) instead of x.mul_(s); or clone the tensor first: its caller may need it later."
)


class HeldTensor(NamedTuple):
    """A tensor that a function holds, and a copy of its numbers."""

    name: str
    tensor: Tensor
    numbers: Tensor


class InplaceWrites:
    """The names of what a subject changed in its calls, and the tensors that it holds besides its module."""

    def __init__(self, plain: Any) -> None:
        tensors = {id(one): (name, one) for name, one in find_held_tensors(plain) if one.numel() <= MOST}
        self._held = [HeldTensor(name, one, one.detach().clone()) for name, one in tensors.values()]
        self.changed: dict[str, None] = {}  # in the order of their first change

    def watch(self, call: Callable[..., Any], names: str = "") -> Callable[..., Any]:
        """Return a call that passes copies of its inputs, and notes which of them, or of the held tensors, it changes."""

        def call_watched(*inputs: Tensor) -> Any:
            self.restore()
            given = [one.clone() for one in inputs]
            returned = call(*given)
            parameters = names.split() or ("x" if len(inputs) == 1 else "q k v").split()
            pairs = [*zip(parameters, given, inputs, strict=True), *self._held]
            self.changed |= {name: None for name, one, before in pairs if not is_identical(one, before)}
            return returned

        return call_watched

    def restore(self) -> None:
        """Restore the held tensors."""
        for one in self._held:
            if not is_identical(one.tensor, one.numbers):
                write_numbers(one.tensor, one.numbers)

    def report_changes(self) -> Iterator[Finding]:
        """Yield the finding of what was changed, if anything was."""
        if self.changed:
            sentence = f"it changes tensors of its caller in place: {', '.join(self.changed)}"
            yield Finding("changed input", sentence, CURE, 1.1, "writes")


@contextlib.contextmanager
def watch_writes(subject: Any) -> Iterator[InplaceWrites]:
    """Create the Writes of a subject for the block, and restore the tensors that the subject holds afterwards."""
    writes = InplaceWrites(get_uncompiled(subject))
    try:
        yield writes
    finally:
        writes.restore()


def find_held_tensors(plain: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function holds, by name: of a partial, its defaults, its closure, and globals that it names."""
    if isinstance(plain, nn.Module):
        return
    if isinstance(plain, functools.partial):
        yield from find_held_tensors(plain.func)
        named = [(f"argument {n}", one) for n, one in enumerate(plain.args)] + list(plain.keywords.items())
    else:
        named = find_named_values(getattr(plain, "__func__", plain))
    yield from ((name, one) for name, one in named if isinstance(one, Tensor))


def find_named_values(function: Any) -> list[tuple[str, Any]]:
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
