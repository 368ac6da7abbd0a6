"""Examine a kernel: its context, auxiliary outputs, gradients and dropout, over the shapes where kernels break."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.examination.evidence import format_numbers
from regard.examination.kernel_checks.auxiliary import WORDS, Auxiliary, check_auxiliary, split_output
from regard.examination.kernel_checks.context import find_wrong_context
from regard.examination.kernel_checks.formula import (
    AttentionFormula,
    KernelShape,
    KernelTask,
    Offset,
    get_allowed_error,
    measure_error,
)
from regard.examination.kernel_checks.gradients import (
    Backward,
    check_dropout,
    check_gradients,
    compute_kernel_gradients,
    draw_slope,
)
from regard.examination.probe_runner import rank_findings
from regard.examination.probes.raises import report_refusal
from regard.examination.report import Checked, Finding, Report, Unknown
from regard.examination.subject.adapters import get_subject_name
from regard.examination.subject.inputs import get_first_line
from regard.mechanism import EVERYTHING, Causal, Mask
from regard.mechanism.arguments import (
    check_choice,
    check_instance,
    check_number,
    check_sequence,
    describe_value,
)
from regard.mechanism.mask_algebra import check_mask
from regard.mechanism.request import check_integer_offset

CAUSAL = Causal()
Reference = Callable[[Tensor, Tensor, Tensor], Tensor]
NUMBER = re.compile(r"\d+")
HALF = 5e-3  # of the largest number: errors below it are those of a lower precision
BETTER = "Keep scores, maxima, sums and the running context in float32; half precision only for the inputs of products."
SHAPES = "Hide keys beyond the last one, and load zeros for columns beyond the width: blocks are larger than these shapes."
FORMULA = "Compare it with softmax(q kᵀ / √d) v, step by step, for q, k and v of one head and four tokens."
GRADIENTS = "backward=, a function (q, k, v, gradient of the context) -> gradients of q, k and v"
LARGEST = "Subtract the maximum of a row from its scores before the exponential, or rescale by the running maximum."


def examine_kernel(
    kernel: Callable[..., Any],
    *,
    reference: Reference | None = None,
    expects: Mask = CAUSAL,
    scale: float | None = None,
    offset: Offset = None,
    outputs: Sequence[str] = (),
    backward: Backward | None = None,
    dropout: tuple[Callable[..., Any], float] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Report:
    """Check a kernel (q, k, v) -> context, or (context, ...), against the formula in float64: return a report.

    q is (b, h, q, d), k and v are (b, g, k, d), where g divides h. The shapes are those in which kernels break: lengths around
    blocks of 16, 64 and 128, widths that are no power of two, grouped heads, and unequal numbers of queries and keys, if
    `offset`, the position of the first query among the keys, is an int or "last" (the last query meets the last key) or
    `expects` is Everything(). A shape that the kernel rejects is noted. The context may be off by twice what the plain formula
    is off in the same dtype, and a few roundings.

    `outputs` names what it returns beside the context, in order: "lse" (log-sum-exp), "lse2" (to base 2), "max" (of scaled
    scores), "weights", or a monitor's "entropy" (of each row, in nats) or "sink" (the weight on the first key), (b, h, q) or
    its mean over queries (b, h), or over sequences too (h,). Without it they are known by their names, or recognized by their
    numbers. Gradients are those of autograd, or of `backward` (q, k, v, gradient of the context). `dropout` is the kernel with
    dropout and its rate. `reference` (q, k, v) -> context replaces the formula, which the other outputs are then not compared
    with.

    Raises ConfigError for a kernel that returns no context, and for bad arguments.
    """
    check_functions(kernel, reference, backward)
    for role in check_sequence("outputs", outputs):
        check_choice("outputs", role, tuple(WORDS))
    if scale is not None and (not math.isfinite(check_number("scale", scale)) or scale == 0):
        raise ConfigError(f"scale, which multiplies the scores, must be finite and not 0; got {scale!r}.")
    if offset is not None and not (isinstance(offset, str) and offset == "last"):
        offset = check_integer_offset(offset, ' or "last"')
    if not check_instance("dtype", dtype, torch.dtype).is_floating_point or torch.finfo(dtype).bits < 16:
        raise ConfigError(f"dtype must be float64, float32, bfloat16 or float16; got {dtype}.")
    task = KernelTask(check_mask(expects), scale, offset, dtype, get_device(device))
    dropping = None if dropout is None else check_dropout_pair(dropout)
    examination = KernelExamination(kernel, reference, tuple(outputs), backward, task)
    examination.run()
    if dropping is not None:
        examination.check_dropout(*dropping)
    return examination.make_report()


def check_functions(kernel: object, reference: object, backward: object) -> None:
    """Raise ConfigError for anything but functions, and None for those that are optional."""
    if not callable(kernel) or isinstance(kernel, type):
        raise ConfigError(f"examine_kernel takes a function (q, k, v) -> context, got {describe_value(kernel)}.")
    for name, one in (("reference", reference), ("backward", backward)):
        if one is not None and (not callable(one) or isinstance(one, type)):
            raise ConfigError(f"{name} is a function, got {describe_value(one)}.")


def get_device(device: object) -> torch.device:
    """Return a device. Raises ConfigError if there is none of this name."""
    if not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device is a name such as 'cuda', got {describe_value(device)}.")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is a name such as 'cuda', got {describe_value(device)}.") from error


def check_dropout_pair(dropout: object) -> tuple[Callable[..., Any], float]:
    """Return a kernel with dropout and its rate. Raises ConfigError for anything but a function and a number from 0 to 1."""
    pair = check_sequence("dropout", dropout)
    if len(pair) != 2 or not callable(pair[0]) or not 0 <= check_number("dropout's rate", pair[1]) < 1:
        raise ConfigError("dropout is a kernel (q, k, v) -> context and its rate, at least 0 and below 1.")
    return pair[0], float(pair[1])


@dataclass(eq=False)
class KernelExamination:
    """A kernel, what it is compared with, and the results so far."""

    kernel: Callable[..., Any]
    reference: Reference | None
    outputs: Sequence[str]
    backward: Backward | None
    task: KernelTask
    findings: list[Finding] = field(default_factory=list)
    taken: list[KernelShape] = field(default_factory=list)
    rejected: list[tuple[KernelShape, str]] = field(default_factory=list)
    right: int = 0  # shapes whose context is right
    worst: float = 0.0  # largest error of a right context, of what is allowed
    roles: dict[str, int] = field(default_factory=dict)  # of auxiliary outputs that are right: shapes
    unnamed: bool = False
    sloped: int = 0  # shapes whose gradients are right
    without_gradient: bool = False
    checked: list[Checked] = field(default_factory=list)

    def run(self) -> None:
        """Try every shape."""
        for shape in self.task.list_shapes():
            given = self.task.make_formula(shape)
            try:
                with torch.no_grad():
                    context, rest = split_output(self.kernel(given.q, given.k, given.v), self.outputs)
            except ConfigError:
                raise
            except Exception as error:  # a kernel may reject a shape
                self.rejected.append((shape, f"{type(error).__name__} with {shape}: {get_first_line(error)}"))
                continue
            self.taken.append(shape)
            exact = given.convert(torch.float64)
            if self.check_context(context, exact, given, shape):
                self.right += 1
                if self.reference is None:
                    self.check_outputs(rest, exact, given, shape)
                    self.check_slopes(exact, given, shape)

    def check_context(self, context: Tensor, exact: AttentionFormula, given: AttentionFormula, shape: KernelShape) -> bool:
        """Return whether a context is right; else keep the finding."""
        expected, plain = exact.context, given.context
        if self.reference is not None:
            expected, plain = (self.reference(one.q, one.k, one.v) for one in (exact, given))
        if context.shape != expected.shape:
            sentence = f"with {shape} its context has the shape {tuple(context.shape)}, not {tuple(expected.shape)}"
            self.findings.append(Finding("raises", sentence, "Return a context (b, h, q, d).", 3.0, "shape"))
            return False
        allowed, error = get_allowed_error(expected, plain), measure_error(context, expected)
        if error <= allowed and not bool(context.isnan().any()):
            self.worst = max(self.worst, error / allowed)
            return True
        self.findings.append(self.explain_context(context, expected, exact, shape, error))
        return False

    def explain_context(
        self, context: Tensor, expected: Tensor, exact: AttentionFormula, shape: KernelShape, error: float
    ) -> Finding:
        """Return the finding of a wrong context, by name if a known mistake gives it."""
        largest = float(expected.abs().max())
        against = "the formula" if self.reference is None else "the reference"
        known = find_wrong_context(context, exact, self.make_other_table(shape)) if self.reference is None else None
        if known is not None:
            sentence = f"with {shape} {known.does}"
            sentence += f"; the context differs by {error:.2g} from {against}" if error < torch.inf else ""
            return Finding(known.kind, sentence, known.cure, 2.0, f"context {NUMBER.sub('', known.does)}")
        row = int((context.double().cpu() - expected.cpu()).abs().nan_to_num(nan=torch.inf).amax((0, 1, 3)).argmax())
        if not context.isfinite().all():
            kind, cure = ("overflow", LARGEST) if shape.size > 1 else ("blind row", LARGEST)
            return Finding(kind, f"with {shape} the context of row {row} is not finite", cure, 1.8, "finite")
        sentence = (
            f"with {shape} the context of row {row} differs by {error:.2g} from {against}, with numbers up to {largest:.2g}"
        )
        if error < HALF * largest and torch.finfo(self.task.dtype).bits > 16:
            return Finding("wrong precision", sentence, BETTER, 1.0, "precision")
        if self.right:
            return Finding("wrong blocks", f"{sentence}; with {self.taken[0]} it does not", SHAPES, 1.5, "blocks")
        return Finding("wrong context", sentence, FORMULA, 1.2, "context")

    def make_other_table(self, shape: KernelShape) -> Tensor | None:
        """Return who sees whom if queries stand at the other end of the keys; None if there are as many queries as keys."""
        if shape.queries == shape.keys:
            return None
        offset = self.task.get_offset(shape)
        return self.task.make_table(shape, 0 if offset else shape.keys - shape.queries)

    def check_outputs(
        self, rest: Sequence[Auxiliary], exact: AttentionFormula, given: AttentionFormula, shape: KernelShape
    ) -> None:
        """Check what was returned beside a right context."""
        for one in rest:
            result = check_auxiliary(one, exact, given, str(shape))
            if isinstance(result, Finding):
                self.findings.append(result)
            elif result is None:
                self.unnamed = True
            else:
                self.roles[result] = self.roles.get(result, 0) + 1

    def check_slopes(self, exact: AttentionFormula, given: AttentionFormula, shape: KernelShape) -> None:
        """Check the gradients of a right context."""
        if self.without_gradient or shape.size > 1:
            return
        slope = draw_slope(exact.context)

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return split_output(self.kernel(q, k, v), self.outputs)[0]

        try:
            found = compute_kernel_gradients(compute, self.backward, given, slope)
        except NotImplementedError:  # of torch, for a device that lacks it
            found = None
        except Exception as error:  # a backward pass may reject a shape that the forward takes
            line = f"with {shape} the backward pass raises {type(error).__name__}: {get_first_line(error)}"
            self.findings.append(Finding("raises", line, "Let the backward pass take what the forward takes.", 1.3, "backward"))
            return
        if found is None:
            self.without_gradient = True
            return
        wrong = list(check_gradients(found, exact, given, slope, str(shape)))
        self.findings += wrong
        self.sloped += not wrong

    def check_dropout(self, kernel: Callable[..., Any], rate: float) -> None:
        """Check the dropout of a kernel."""
        for one in check_dropout(kernel, rate, self.task):
            (self.findings if isinstance(one, Finding) else self.checked).append(one)  # type: ignore[arg-type]

    def make_report(self) -> Report:
        """Return the report of the results so far."""
        name = get_subject_name(self.kernel)
        if not self.taken:
            return Report(name, str(self.task.expects), (report_refusal([reason for _, reason in self.rejected]),))
        findings = rank_findings(self.findings)
        notes = [f"{len(self.taken)} shapes of {str(self.task.dtype).removeprefix('torch.')} on {self.task.device}"]
        if self.rejected:
            notes.append(f"it rejects {len(self.rejected)} more: {self.rejected[0][1]}")
        return Report(
            name, str(self.task.expects), findings, tuple(self.list_checked()), tuple(self.list_unknown()), tuple(notes)
        )

    def list_checked(self) -> Iterator[Checked]:
        """Yield what was found right."""
        lengths = format_numbers(sorted({one.keys for one in self.taken}))
        widths = format_numbers(sorted({one.width for one in self.taken}))
        sizes = f"{self.right} shapes, with {lengths} keys and widths {widths}"
        if self.right == len(self.taken):
            against = "softmax(q kᵀ scale) v" if self.reference is None else "the reference"
            yield Checked(f"the context is that of {against}", f"{sizes}; at most {self.worst:.2g} of the allowed error")
        for role, count in self.roles.items():
            if not any(one.cause == f"auxiliary {role}" for one in self.findings):
                yield Checked(f"the {WORDS[role]} beside it", f"{count} shapes")
        if self.sloped and not any(one.kind == "wrong gradient" for one in self.findings):
            yield Checked("the gradients of q, k and v", f"{self.sloped} shapes")
        yield from self.checked

    def list_unknown(self) -> Iterator[Unknown]:
        """Yield what the kernel does not show."""
        if self.unnamed:
            yield Unknown("what it returns beside the context", f"outputs=, in order: {', '.join(WORDS)}")
        if self.without_gradient:
            yield Unknown("its gradients: the context has none", GRADIENTS)
        if self.task.offset is None and self.task.expects != EVERYTHING and self.task.expects.key_count is None:
            yield Unknown(
                "other numbers of queries than of keys", 'offset=0 as in torch, or offset="last" as in FlashAttention'
            )
