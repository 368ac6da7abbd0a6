"""Find the attention inside a layer that does more, and call it as the layer does."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.examination.case import Case
from regard.examination.subject.adapters import SubjectAdapter
from regard.examination.subject.attention_output import AttentionOutput, extract_output
from regard.examination.subject.call_conventions import AttentionFunction
from regard.examination.subject.localize import hook_parts
from regard.examination.subject.zero_weights import has_token_interaction

TRIED = 3  # parts to identify, the outermost first


class PartCall(NamedTuple):
    """The positional and named inputs of a part of a module, and its output."""

    name: str
    part: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    output: Any

    @property
    def x(self) -> Tensor:
        """The first input."""
        first: Tensor = [*self.inputs, *self.named.values()][0]
        return first


def find_attention_parts(case: Case) -> Iterator[Case]:
    """Yield a case for each part of a module in which tokens interact; the outermost first."""
    (x,) = case.make_usual_inputs()
    for given in sorted(record_part_calls(case, x), key=lambda one: one.name.count(".")):
        part = make_part_case(case, given) if has_single_sequence(given, x) else None
        if part is not None and has_token_interaction(part.subject, part.shapes):
            yield part


def find_identified_part(case: Case) -> tuple[Case | None, str]:
    """Return the first part whose formula is identified, and the name of the last part tried in which tokens interact.

    None and "" where there is none; at most TRIED parts are read.
    """
    first = ""
    try:
        for part in itertools.islice(find_attention_parts(case), TRIED):
            first = part.subject.name  # the innermost so far, which can be examined alone
            if part.match is not None:
                return part, first
    except Exception:  # a part that cannot be called again with its inputs
        return None, first
    return None, first


def record_part_calls(case: Case, x: Tensor) -> list[PartCall]:
    """Return the inputs and output of each part that ran exactly once."""
    assert case.subject.module is not None
    found: list[PartCall] = []
    with hook_parts(case.subject.module, lambda *arguments: found.append(PartCall(*arguments))):
        case.run_subject(x)
    return [one for one in found if sum(other.part is one.part for other in found) == 1]


def has_single_sequence(given: PartCall, x: Tensor) -> bool:
    """Return whether a part takes one sequence, (b, t, c), once or as query, key and value alike, and returns one as long."""
    values = [*given.inputs, *given.named.values()]
    if not values or not isinstance(values[0], Tensor) or not is_sequence(values[0], x):
        return False
    output = given.output[0] if isinstance(given.output, tuple) and given.output else given.output
    alike = [one for one in values if isinstance(one, Tensor) and one.shape == values[0].shape]
    return is_sequence(output, x) and all(
        one is values[0] for one in alike
    )  # a tensor of another shape is a mask, or positions


def is_sequence(value: Any, x: Tensor) -> bool:
    """Return whether a value is a sequence of vectors as long as x."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == x.shape[:2] and value.is_floating_point()


def make_part_call(given: PartCall, part: nn.Module) -> AttentionFunction:
    """Make the call of a part, or of a copy of it, with all its other inputs as recorded."""

    def call(x: Tensor) -> AttentionOutput:
        def replace_input(value: Any) -> Any:
            if value is given.x:
                return x
            return value.to(x.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        inputs = [replace_input(one) for one in given.inputs]
        returned = part(*inputs, **{name: replace_input(one) for name, one in given.named.items()})
        return extract_output(returned, x.shape[-2], x.shape[:-1])

    return call


def make_part_case(case: Case, given: PartCall) -> Case:
    """Return the case of a part, with the same expectation and bound to the layer's batch and length."""
    subject = SubjectAdapter(
        given.name,
        given.part,
        "x",
        given.x.dtype,
        given.x.device,
        make_part_call(given, given.part),
        lambda part: make_part_call(given, part),
        note=f"{given.name} with the inputs that {case.subject.name} passes to it",
    )
    b, t, width = given.x.shape
    shapes = replace(case.shapes, width=width, tokens=t, batch=b, bound=True, spread=1.0)
    return case.make_subcase(subject, shapes)
