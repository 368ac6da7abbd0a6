"""A subject, its expectation, its inputs and its measurements: the argument of every probe."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.examination import reach, rules
from regard.examination.answers import Answer
from regard.examination.calls import Call
from regard.examination.inputs import Shapes, described
from regard.examination.reach import Reach
from regard.examination.subjects import AskedError, ChangedError, Subject
from regard.examination.untouched import seeded
from regard.mechanism import Mask
from regard.mechanism.rule import Offset


class Case:
    """One subject under examination; each measurement is made once."""

    def __init__(
        self,
        subject: Subject,
        expects: Mask,
        shapes: Shapes,
        scale: float | None = None,
        offset: Offset = 0,
        identify: Callable[["Case"], Any] | None = None,
    ) -> None:
        self.subject, self.expects, self.shapes = subject, expects, shapes
        self.scale, self.offset, self._identify = scale, offset, identify
        self.narrow = ""  # the reason if `double` is None
        self._widths: dict[tuple[int, ...], int] = {}  # widths of contexts, by the widths of inputs

    def inputs(self, t: int | None = None, b: int = 2, seed: int = 0, size: float = 1.0) -> tuple[Tensor, ...]:
        """Return (x,), x (b, t, c), or (q, k, v), each (b, h, t, d): normal numbers times size, the same for the same seed.

        A subject that carries its own padding or documents always gets the sample's b and t, whatever is passed: its `free` is
        False.
        """
        return self.shapes.make(t, b, seed, size, self.subject.dtype, self.subject.device)

    def ask(self, *inputs: Tensor) -> Answer:
        """Return the subject's answer unchanged, without gradient. Raises AskedError if the subject raises."""
        with torch.no_grad():
            return self._called(inputs)

    def context(self, *inputs: Tensor) -> Tensor:
        """Return the context (b, t, c), heads side by side, with gradient. Raises AskedError if the subject raises."""
        return joined(self._called(inputs).context, self.subject.form)

    def repeated(self, *inputs: Tensor, seed: int = 0) -> Tensor:
        """Return the context (b, t, c), without gradient, with fixed random numbers. Raises AskedError as `context` does."""
        seeded(seed, self.subject.device)
        with torch.no_grad():
            return self.context(*inputs)

    def _called(self, inputs: tuple[Tensor, ...]) -> Answer:
        """Call the subject and check its context: of the inputs' shape, and as wide as before for inputs of the same width.

        Raises AskedError if the subject raises, and ChangedError if the shape differs.
        """
        try:
            answer = self.subject.call(*inputs)
        except Exception as error:  # a user's layer may raise anything
            raise AskedError(described(inputs), error) from error
        shape, width = answer.context.shape, tuple(x.shape[-1] for x in inputs)
        expected = *inputs[0].shape[:-1], self._widths.setdefault(width, shape[-1])
        if shape != expected:
            raise ChangedError(described(inputs), tuple(shape), expected)
        return answer

    def expected(self, *inputs: Tensor) -> Tensor:
        """Return who may see whom for these inputs: bool (b, q, k), True if any head may see."""
        q, k = inputs[0].shape[-2], inputs[-1].shape[-2]
        table = self.expects.table(q, k, self.offset)
        table = table[(None,) * (4 - table.dim())]
        return table.any(1).expand(len(inputs[0]), q, k)

    def at(self, t: int) -> "Case":
        """Return the case with another usual number of tokens."""
        shapes = replace(self.shapes, tokens=t)
        return Case(self.subject, self.expects, shapes, self.scale, self.offset, self._identify)

    def within(self, subject: Subject, shapes: Shapes) -> "Case":
        """Return the case of a part of the subject, with the same expectation."""
        return Case(subject, self.expects, shapes, self.scale, self.offset, self._identify)

    @property
    def free(self) -> bool:
        """Whether lengths and batches other than the usual may be tried."""
        return not self.shapes.bound

    def usual(self, seed: int = 0, size: float = 1.0) -> tuple[Tensor, ...]:
        """Return inputs of the usual length and batch."""
        return self.inputs(None, self.shapes.batch, seed, size)

    @cached_property
    def reach(self) -> Reach:
        """Who sees whom, as measured: by gradients, in float64 where that runs, and by changing tokens."""
        best = self.double or self
        queries, keys = self.shapes.tokens - self.shapes.gap, self.shapes.tokens
        slopes = None
        if torch.finfo(best.subject.dtype).bits >= 32:
            slopes = sloped(best, rules.chosen(queries, self.expects))
        few = keys <= rules.FEW
        moved = reach.by_change(self.context, self.usual, range(keys)) if few or slopes is None else None
        strength = reach.largest([one for one in (slopes, moved) if one is not None])
        own = None
        if slopes is not None and self.subject.form == "x" and keys > 2:
            own = reach.passes_own(best.context, best.usual, *self._seeing_itself())
        return Reach(strength, reach.threshold(best.subject.dtype), "changes" if slopes is None else "gradients", own)

    def _seeing_itself(self) -> tuple[int, int]:
        """Return a sequence and a query of it, the last one that may see its own token and others."""
        expected = self.expected(*self.usual())
        several = expected.diagonal(dim1=1, dim2=2) & (expected.sum(-1) > 1)
        b, i = (several.nonzero() if several.any() else torch.tensor([[0, expected.shape[1] - 1]]))[-1].tolist()
        return b, i

    @cached_property
    def double(self) -> "Case | None":
        """The case in float64, of a copy of a module or of a function itself; None if that does not run."""
        if self.subject.dtype == torch.float64:
            return self
        call = widened(self.subject)
        if call is None:
            self.narrow = "it cannot be copied"
            return None
        case = Case(
            replace(self.subject, call=call, dtype=torch.float64),
            self.expects,
            self.shapes,
            self.scale,
            self.offset,
            self._identify,
        )
        try:
            dtype = case.ask(*case.usual()).context.dtype
        except AskedError as error:
            self.narrow = f"in float64 it {error.did}"
            return None
        self.narrow = "" if dtype == torch.float64 else f"in float64 it gives {str(dtype).removeprefix('torch.')}"
        return None if self.narrow else case

    @cached_property
    def identified(self) -> Any:
        """What the subject computes, by its own parameters; None if nothing matches."""
        return None if self._identify is None else self._identify(self)


def sloped(case: Case, rows: list[int]) -> Tensor | None:
    """Return the strengths measured by gradients; None if the subject has no gradient."""
    try:
        if not case.context(*(x.requires_grad_() for x in case.usual())).requires_grad:
            return None
        return reach.by_gradient(case.context, case.usual, rows)
    except AskedError:  # a kernel without a gradient, or a layer that refuses inputs that require one
        return None


def joined(context: Tensor, form: str) -> Tensor:
    """Return a context as (b, t, c): the heads of a function's (b, h, t, e) are placed side by side."""
    return context.transpose(1, 2).flatten(2) if form == "qkv" and context.dim() == 4 else context


def widened(subject: Subject) -> Call | None:
    """Return the call of a float64 copy of a subject; None if the subject cannot be copied."""
    if subject.module is None:
        return subject.call
    module = copied(subject)
    return None if module is None or subject.again is None else subject.again(module)


def copied(subject: Subject) -> nn.Module | None:
    """Return a float64 copy of a subject's module; None if there is none, or the copy cannot be called in its place."""
    return None if subject.module is None or subject.again is None else doubled(subject.module)


def doubled(module: nn.Module) -> nn.Module | None:
    """Return a float64 copy of a module; None if it cannot be copied."""
    try:
        return copy.deepcopy(module).double()
    except Exception:  # some objects that a module holds cannot be copied
        return None
