"""The comparison of a recurrence that was read from a loop with what the loop computed, token by token in float64."""

from math import sqrt

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.plain_tensors import UnreadableError

OTHERWISE = "its formula differs from its output by {:.2g}"
COARSE = "its states are rounded to {} so often that its formula cannot be compared with its output"
ENTRIES = 2**26  # of states, of all tokens, that are computed; at least those of some batch rows and heads
PLANES = 8  # batch rows and heads that are compared in any case
BLOCK_ENTRIES = 2**20  # of states that are computed at a time
ROUNDINGS = 64  # of an output, relative to the sum of the sizes of its terms
EXACT = 2.0**-48  # rounding of sums of logarithms in float64
FINE = 2.0**-16  # rounding up to which the sizes of the terms bound that of an output closely enough
TIMES_NOISE = 4  # of the same recurrence rounded as its states are


def compare_outputs(
    mechanism: LinearRecurrence, values: Tensor, outputs: Tensor, initial: Tensor | None, skip_size: Tensor | None = None
) -> None:
    """Compare a recurrence from an initial state (b, h, d, e) with the outputs (b, h, t, e) of all batch rows and heads.

    skip_size (b, h, t) are the sums of the sizes of the products that `skip` adds up, perhaps to nearly 0. Of long ones with
    many, some are compared. Raises UnreadableError if they differ, or if rounding hides whether they do.
    """
    b, h, t, e = outputs.shape
    entries = mechanism.tensors["q"].shape[3] * e
    count = min(b * h, max(PLANES, ENTRIES // (t * entries)))
    chosen = torch.linspace(0, b * h - 1, count, device=outputs.device).round().long()
    dtype = max((x.dtype for x in (outputs, values, *mechanism.tensors.values())), key=lambda one: torch.finfo(one).eps)
    tensors = mechanism.tensors if skip_size is None else {**mechanism.tensors, "skip_size": skip_size}

    def select(x: Tensor, planes: Tensor) -> Tensor:
        batch, heads = planes // h, planes % h
        return x[batch if len(x) > 1 else batch * 0, heads // (h // x.shape[1])].double()

    for planes in chosen.split(max(1, BLOCK_ENTRIES // entries)):
        parts = {name: select(x, planes) for name, x in tensors.items()}
        state = None if initial is None else select(initial, planes)
        given = parts, select(values, planes), state, mechanism.is_strict
        compare_planes(given, select(outputs, planes), dtype)


def compare_planes(given: tuple[dict[str, Tensor], Tensor, Tensor | None, bool], outputs: Tensor, dtype: torch.dtype) -> None:
    """Compare a recurrence, given by its arguments, with outputs (n, t, e) that were rounded to a dtype.

    Each output may differ as the sizes of its terms allow, and all of them by a multiple of what rounding alone changes.
    """
    found, size = run_recurrence(*given)
    difference, eps = (found - outputs).abs(), max(EXACT, torch.finfo(dtype).eps)
    is_near = (difference <= (ROUNDINGS + sqrt(outputs.shape[1])) * eps * size) | (found == outputs)
    if not bool((is_near | outputs.isnan()).all()):  # the model's own output may be NaN
        raise UnreadableError(OTHERWISE.format(float(difference.nan_to_num(torch.inf).amax())))
    if eps <= FINE:
        return
    rounded, _ = run_recurrence(*given, dtype)
    is_number = outputs.isfinite()
    noise, error, signal = (
        x.where(is_number, 0).square().sum((1, 2)).sqrt() for x in (rounded - found, outputs - found, outputs)
    )
    limit = TIMES_NOISE * (noise + eps * signal)
    if bool((error > limit).any()):
        raise UnreadableError(OTHERWISE.format(float(difference.where(is_number, 0).amax())))
    if not bool((limit <= signal / 4).all()):
        raise UnreadableError(COARSE.format(str(dtype).removeprefix("torch.")))


def run_recurrence(
    parts: dict[str, Tensor], values: Tensor, initial: Tensor | None, is_strict: bool, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over values (n, t, e), rounded to a dtype; return its outputs and the sums of the sizes of their terms.

    A strict one reads the state of the token before, to which `skip` adds the value of its own.
    """

    def cast(x: Tensor) -> Tensor:
        return x if dtype is torch.float64 else x.to(dtype).double()

    n, t, e = values.shape
    decay = cast((parts["decay"] * parts.get("rates", 1.0)).exp()).expand(n, t, -1).unsqueeze(3)
    q, k = (parts[name].expand(n, t, -1).unsqueeze(3) for name in ("q", "k"))
    ones = values.new_ones(n, 1)
    scale, skip, skip_size = (
        x.expand(n, t)[..., None, None]
        for x in (
            parts.get("key_scale", parts.get("beta", ones)),
            parts.get("skip", 0 * ones),
            parts.get("skip_size", parts.get("skip", 0 * ones).abs()),
        )
    )
    if dtype is torch.float64 and initial is None and q.shape[2] == 1 and not is_strict and sums_all(parts, decay):
        written, own = (scale * k).squeeze(3) * values, skip.squeeze(3) * values
        own_size = skip_size.squeeze(3) * values.abs()
        return q[..., 0] * written.cumsum(1) + own, q[..., 0].abs() * written.abs().cumsum(1) + own_size
    state = values.new_zeros(n, q.shape[2], e) if initial is None else initial
    bound, outputs, sizes = state.abs(), [], []
    for i in range(t):
        before, bound_before, value = state, bound, values[:, i, None]
        state, bound = cast(decay[:, i] * state), decay[:, i] * bound
        if "beta" in parts:
            value = cast(value - cast(k[:, i].mT @ state))
        write = cast(cast(scale[:, i] * k[:, i]) * value)
        state, bound = cast(state + write), bound + write.abs()
        own = skip[:, i] * values[:, i, None]
        outputs.append(cast(cast(q[:, i] * (before if is_strict else state)).sum(1) + own.squeeze(1)))
        own_size = skip_size[:, i] * values[:, i, None].abs()
        sizes.append((q[:, i].abs() * (bound_before if is_strict else bound)).sum(1) + own_size.squeeze(1))
    return torch.stack(outputs, 1), torch.stack(sizes, 1)


def sums_all(parts: dict[str, Tensor], decay: Tensor) -> bool:
    """Return whether a state is the sum of all that was written, as of running means: without a decay and a delta rule."""
    return "beta" not in parts and bool((decay == 1).all())
