"""Read the weights of a layer by its values, whatever computes them: values of one token are 1, all others 0, and each context
is a column of weights. Linear attention, kernels and loops over keys are read so.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.identify.projection_layouts import parse_matrix_role
from regard.examination.subject.adapters import SubjectAdapter

NEAR = 1e-9  # of the largest number, in float64
PARTS = {"v": 1, "kv": 2, "qkv": 3}  # equal parts of a projection's columns, of which the values are the last


class Ends(NamedTuple):
    """The projection that makes values, the first of its columns that do, and the projection of the output."""

    made: nn.Linear
    first: int
    output: nn.Linear


def read_weights_by_values(subject: SubjectAdapter, double: nn.Module | None, x: Tensor) -> Tensor | None:
    """Return the weights (b, h, q, k) of a layer for x (b, t, c), in float64; None if its context is no sum of values.

    `double` is a float64 copy of its module, None if there is none. Another sum of other values is compared with the context,
    so that nothing but a weighted sum in each column is read.
    """
    ends = None if double is None or subject.form != "x" else find_ends(double)
    if double is None or ends is None or subject.again is None:
        return None
    call, x = subject.again(double), x.double()
    b, t = x.shape[:2]

    def compute_context(values: Tensor) -> Tensor | None:
        with replace_values(ends, values) as contexts, torch.no_grad():
            try:
                call(x)
            except Exception:  # a user's layer may refuse such values
                return None
        return contexts[0] if len(contexts) == 1 and contexts[0].shape == values.shape else None

    values = x.new_zeros(b, t, ends.made.out_features - ends.first)
    random_values = torch.randn(values.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype).to(x.device)
    columns = [compute_context(values)]
    for j in range(t):
        one = values.clone()
        one[:, j] = 1
        columns.append(compute_context(one))
    context = compute_context(random_values)
    if context is None or any(one is None for one in columns):
        return None
    first, *rest = [one for one in columns if one is not None]
    weights = torch.stack(rest, -1)  # (b, q, c, k)
    expected = torch.einsum("bqck,bkc->bqc", weights, random_values)
    if bool(first.any()) or bool((expected - context).abs().max() > NEAR * context.abs().max()):
        return None
    return select_heads(weights)


def find_ends(module: nn.Module) -> Ends | None:
    """Return the projections of values and of the output of a module by their names; None unless there is one of each."""
    roles = [(parse_matrix_role(name), part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    makers = [(role, part) for role, part in roles if role in PARTS]
    outputs = [part for role, part in roles if role == "o"]
    if len(makers) != 1 or len(outputs) != 1:
        return None
    role, part = makers[0]
    count = PARTS[role]
    return None if part.out_features % count else Ends(part, part.out_features // count * (count - 1), outputs[0])


@contextlib.contextmanager
def replace_values(ends: Ends, values: Tensor) -> Iterator[list[Tensor]]:
    """Replace the values (b, t, c) that a projection makes, and keep what the projection of the output is given."""
    contexts: list[Tensor] = []

    def write(_: nn.Module, inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., ends.first :] = values
        return output

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        contexts.append(inputs[0].detach().clone())

    hooks = [ends.made.register_forward_hook(write), ends.output.register_forward_pre_hook(keep)]
    try:
        yield contexts
    finally:
        for one in hooks:
            one.remove()


def select_heads(weights: Tensor) -> Tensor | None:
    """Return the weights (b, h, q, k) of heads, which are equal neighboring columns (b, q, c, k); None for several widths."""
    near = NEAR * min(float(weights.abs().max()), 1.0)  # of weights, beside which numbers in place of -inf may stand
    changes = (weights[:, :, 1:] - weights[:, :, :-1]).abs().amax((0, 1, 3)) > near
    starts = [0, *(changes.nonzero().flatten() + 1).tolist()]
    width, rest = divmod(weights.shape[2], len(starts))
    return None if rest or starts != list(range(0, weights.shape[2], width)) else weights[:, :, ::width].transpose(1, 2)
