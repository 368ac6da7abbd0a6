"""A subject, its expectation, its inputs and its measurements: the argument of every probe."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.examination import dependency, mask_requirements
from regard.examination.call_reading.function_calls import MixingFunction, find_mixing_function
from regard.examination.call_reading.inner_calls import NOTHING, InnerCall, RecordedCalls, record_inner_calls
from regard.examination.dependency import Dependency
from regard.examination.identify.value_reading import read_weights_by_values
from regard.examination.subject.adapters import ShapeChangedError, SubjectAdapter, SubjectError
from regard.examination.subject.attention_output import AttentionOutput
from regard.examination.subject.inputs import InputShapes, format_shapes
from regard.examination.subject.restore_state import preserve_random_states, seed_generators
from regard.mechanism import Mask
from regard.mechanism.mask_algebra import Offset

LONG = (300, 100, 40)  # tokens of a longer input; beyond 256, bfloat16 has no numbers for all positions


class Case:
    """One subject under examination; each measurement is made once."""

    def __init__(
        self,
        subject: SubjectAdapter,
        expects: Mask,
        shapes: InputShapes,
        scale: float | None = None,
        offset: Offset = 0,
        identify: Callable[["Case"], Any] | None = None,
    ) -> None:
        self.subject, self.expects, self.shapes = subject, expects, shapes
        self.scale, self.offset, self._identify = scale, offset, identify
        self.narrow = ""  # the reason if `double` is None
        self._mask_tables: dict[tuple[int, int], Tensor] = {}
        self._widths: dict[tuple[int, ...], int] = {}  # widths of contexts, by the widths of inputs

    def make_inputs(self, t: int | None = None, b: int = 2, seed: int = 0, size: float = 1.0) -> tuple[Tensor, ...]:
        """Return (x,), x (b, t, c), or (q, k, v), each (b, h, t, d): normal numbers times size, the same for the same seed.

        A subject that carries its own padding or documents always gets the sample's b and t, whatever is passed: its
        `can_resize` is False.
        """
        return self.shapes.make(t, b, seed, size, self.subject.dtype, self.subject.device)

    def run_subject(self, *inputs: Tensor) -> AttentionOutput:
        """Return the subject's answer unchanged, without gradient. Raises SubjectError if the subject raises."""
        with torch.no_grad():
            return self._call_subject(inputs)

    def compute_context(self, *inputs: Tensor) -> Tensor:
        """Return the context (b, t, c), heads side by side, with gradient. Raises SubjectError if the subject raises."""
        return join_context_heads(self._call_subject(inputs).context, self.subject.form)

    def compute_seeded_context(self, *inputs: Tensor, seed: int = 0) -> Tensor:
        """Return the context (b, t, c), without gradient, with fixed random numbers. Raises SubjectError as `context` does."""
        seed_generators(seed, self.subject.device)
        with torch.no_grad():
            return self.compute_context(*inputs)

    def _call_subject(self, inputs: tuple[Tensor, ...]) -> AttentionOutput:
        """Call the subject and check its context: of the inputs' shape, and as wide as before for inputs of the same width.

        Raises SubjectError if the subject raises, and ShapeChangedError if the shape differs.
        """
        try:
            answer = self.subject.call(*inputs)
        except Exception as error:  # a user's layer may raise anything
            raise SubjectError(format_shapes(inputs), error) from error
        shape, width = answer.context.shape, tuple(x.shape[-1] for x in inputs)
        expected = *inputs[0].shape[:-1], self._widths.setdefault(width, shape[-1])
        if shape != expected:
            raise ShapeChangedError(format_shapes(inputs), tuple(shape), expected)
        return answer

    def get_expected_visibility(self, *inputs: Tensor) -> Tensor:
        """Return who may see whom for these inputs: bool (b, q, k), True if any head may see."""
        q, k = inputs[0].shape[-2], inputs[-1].shape[-2]
        return self.get_mask_table(q, k).any(1).expand(len(inputs[0]), q, k)

    def get_mask_table(self, q: int, k: int) -> Tensor:
        """Return the expected mask of q queries and k keys, bool (b or 1, h or 1, q, k), made once for each size."""
        if (q, k) not in self._mask_tables:
            table = self.expects.table(q, k, self.offset)
            self._mask_tables[q, k] = table[(None,) * (4 - table.dim())]
        return self._mask_tables[q, k]

    def make_subcase(self, subject: SubjectAdapter, shapes: InputShapes) -> "Case":
        """Return the case of a part of the subject, with the same expectation."""
        return Case(subject, self.expects, shapes, self.scale, self.offset, self._identify)

    @property
    def can_resize(self) -> bool:
        """Whether lengths and batches other than the usual may be tried."""
        return not self.shapes.bound

    def make_usual_inputs(self, seed: int = 0, size: float = 1.0) -> tuple[Tensor, ...]:
        """Return inputs of the usual length and batch."""
        return self.make_inputs(None, self.shapes.batch, seed, size)

    @cached_property
    def usual_context(self) -> Tensor:
        """The context (b, t, c) of the usual inputs, without gradient, with fixed random numbers."""
        with preserve_random_states():
            return self.compute_seeded_context(*self.make_usual_inputs())

    @cached_property
    def measured_dependency(self) -> Dependency:
        """Who sees whom, as measured: by gradients, in float64 where that runs, and by changing tokens."""
        best = self.double or self
        queries, keys = self.shapes.tokens - self.shapes.gap, self.shapes.tokens
        gradients = None
        if torch.finfo(best.subject.dtype).bits >= 32:
            gradients = measure_gradients(best, mask_requirements.choose_queries(queries, self.expects))
        few = keys <= mask_requirements.FEW
        changes = (
            dependency.measure_by_change(self.compute_context, self.make_usual_inputs, range(keys))
            if few or gradients is None
            else None
        )
        strength = dependency.take_largest([one for one in (gradients, changes) if one is not None])
        passes_own_value = None
        if gradients is not None and self.subject.form == "x" and keys > 2:
            passes_own_value = dependency.can_pass_own_value(
                best.compute_context, best.make_usual_inputs, *self._find_own_token_query()
            )
        return Dependency(
            strength,
            dependency.get_gradient_threshold(best.subject.dtype),
            "changes" if gradients is None else "gradients",
            passes_own_value,
        )

    def _find_own_token_query(self) -> tuple[int, int]:
        """Return a sequence and a query of it, the last one that may see its own token and others."""
        expected = self.get_expected_visibility(*self.make_usual_inputs())
        several = expected.diagonal(dim1=1, dim2=2) & (expected.sum(-1) > 1)
        b, i = (several.nonzero() if several.any() else torch.tensor([[0, expected.shape[1] - 1]]))[-1].tolist()
        return b, i

    @cached_property
    def double(self) -> "Case | None":
        """The case in float64, of a copy of a module or of a function itself; None if that does not run."""
        if self.subject.dtype == torch.float64:
            return self
        if self.subject.module is not None and self.double_module is None:
            self.narrow = "it cannot be copied"
            return None
        case = self.make_subcase(make_double_subject(self.subject, self.double_module), self.shapes)
        case.double_module = self.double_module
        try:
            dtype = case.usual_context.dtype
        except SubjectError as error:
            self.narrow = f"in float64 it {error.did}"
            return None
        self.narrow = "" if dtype == torch.float64 else f"in float64 it returns {str(dtype).removeprefix('torch.')}"
        return None if self.narrow else case

    @cached_property
    def double_module(self) -> nn.Module | None:
        """A float64 copy of the subject's module; None if there is none, or the copy cannot be called in its place."""
        return copy_subject_as_double(self.subject)

    def read_weights_by_values(self, x: Tensor) -> Tensor | None:
        """Return the weights (b, h, q, k) of a layer for x, read by its values in float64; None if they cannot be read."""
        return read_weights_by_values(self.subject, self.double_module, x)

    @cached_property
    def weights_by_values(self) -> Tensor | None:
        """The weights (b, h, q, k) for the usual inputs, as `read_weights_by_values` reads them."""
        best = self.double or self
        return self.read_weights_by_values(self.make_usual_inputs()[0]) if best is self else best.weights_by_values

    @property
    def inner_calls(self) -> list[InnerCall]:
        """The attention calls that the subject's module makes for its usual inputs, and softmaxes whose heads it mixes.

        Empty if one of them cannot be read.
        """
        recorded = self.recorded
        if recorded.missed or not all(one.softmaxes for one in recorded.matrices):
            return []
        return [*recorded.calls, *(call for one in recorded.matrices for call in one.softmaxes)]

    @cached_property
    def recorded(self) -> RecordedCalls:
        """The attention calls of the module for its usual inputs, weights that are no softmax, and what was missed."""
        return self._record_calls(training=False)

    @cached_property
    def training_calls(self) -> list[InnerCall]:
        """The same in training mode; empty if they are not as many."""
        calls = self._record_calls(training=True).calls if self.inner_calls else []
        return calls if len(calls) == len(self.inner_calls) else []

    @cached_property
    def long_calls(self) -> list[InnerCall]:
        """The attention calls for the first of LONG tokens that the subject takes; empty if it takes none, or one is missed."""
        if not self.inner_calls or not self.can_resize:
            return []
        for t in LONG:
            recorded = self._record_calls(training=False, tokens=t) if t <= (self.shapes.most or t) else NOTHING
            if recorded.calls:
                return recorded.calls if len(recorded.calls) == len(self.inner_calls) and not recorded.missed else []
        return []

    def _record_calls(self, training: bool, tokens: int | None = None) -> RecordedCalls:
        """Record the attention calls of the subject's module, in float64 if it runs in half precision."""
        module, call, dtype = self.subject.module, self.subject.call, self.subject.dtype
        if module is None:
            return NOTHING
        modes = {part: part.training for part in module.modules()}
        try:
            if torch.finfo(dtype).bits < 32 and (double := copy_subject_as_double(self.subject)) is not None:
                module, call, dtype = double, make_double_subject(self.subject, double).call, torch.float64
            usual = self.make_usual_inputs(1) if tokens is None else self.make_inputs(tokens, 1, 1)
            inputs = tuple(x.to(dtype) for x in usual)
            for part in module.modules():
                part.training = training
            return record_inner_calls(module, lambda: call(*inputs))
        except Exception:  # whatever a user's layer raises: another probe reports it
            return NOTHING
        finally:
            for part, mode in modes.items():
                part.training = mode

    @cached_property
    def mixing_function(self) -> MixingFunction | None:
        """The function outside of attention that carries the last token to earlier ones; None if there is none."""
        module = self.subject.module
        if module is None or self.subject.form != "x" or self.shapes.tokens < 2:
            return None
        (x,), (other,) = self.make_usual_inputs(3), self.make_usual_inputs(103)
        last = x.shape[1] - 1
        (changed,) = dependency.replace_token((x,), (other,), 0, last)
        try:
            return find_mixing_function(module, self.subject.call, x, changed, last)
        except Exception:  # whatever a user's layer raises: another probe reports it
            return None

    @cached_property
    def match(self) -> Any:
        """What the subject computes, by its own parameters; None if nothing matches."""
        return None if self._identify is None else self._identify(self)


def measure_gradients(case: Case, rows: list[int]) -> Tensor | None:
    """Return the strengths measured by gradients; None if the subject has no gradient."""
    try:
        return dependency.measure_by_gradient(case.compute_context, case.make_usual_inputs, rows)
    except SubjectError:  # a kernel without a gradient, or a layer that refuses inputs that require one
        return None


def join_context_heads(context: Tensor, form: str) -> Tensor:
    """Return a context as (b, t, c): the heads of a function's (b, h, t, e) are placed side by side."""
    return context.transpose(1, 2).flatten(2) if form == "qkv" and context.dim() == 4 else context


def make_double_subject(subject: SubjectAdapter, double: nn.Module | None) -> SubjectAdapter:
    """Return a subject that calls a float64 copy of its module; itself in float64 if it has no module."""
    if double is None or subject.again is None:
        return replace(subject, dtype=torch.float64)
    return replace(subject, call=subject.again(double), dtype=torch.float64)


def copy_subject_as_double(subject: SubjectAdapter) -> nn.Module | None:
    """Return a float64 copy of a subject's module; None if there is none, or the copy cannot be called in its place."""
    return None if subject.module is None or subject.again is None else copy_module_as_double(subject.module)


def copy_module_as_double(module: nn.Module) -> nn.Module | None:
    """Return a float64 copy of a module; None if it cannot be copied."""
    dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    try:
        copied = copy.deepcopy(module).double()
        keep_eps(copied, dtype)
        return copied
    except Exception:  # some objects that a module holds cannot be copied
        return None


class RMSNormEps(TorchFunctionMode):
    """A torch function mode in which rms_norm without eps takes that of a dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "rms_norm" and len(args) < 4 and given.get("eps") is None:
            given["eps"] = self.eps
        return func(*args, **given)


@contextmanager
def use_constants_of(dtype: torch.dtype) -> Iterator[None]:
    """Let torch.finfo(torch.float64), and norms without an eps, take the numbers of another dtype in the context."""
    plain = torch.finfo

    def find_limits(asked: torch.dtype | None = None) -> torch.finfo:
        return plain(dtype if asked in (None, torch.float64) else asked)

    with mock.patch.object(torch, "finfo", find_limits), RMSNormEps(plain(dtype).eps):
        yield


def keep_eps(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the eps of norms that take it from their dtype to that of `dtype`."""
    for part in module.modules():
        if "eps" in vars(part) and part.eps is None:
            part.eps = torch.finfo(dtype).eps
