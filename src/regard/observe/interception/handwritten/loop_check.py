"""The comparison of a recurrence that was read from a loop with what the loop computed, token by token in float64."""

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.plain_tensors import UnreadableError

OTHERWISE = "its formula differs from its output by {:.2g}"
PLANES = 8  # batch rows and heads whose outputs are compared
ROUNDINGS = 64  # of an output, relative to the sum of the sizes of its terms; four more for each token
EXACT = 2.0**-48  # rounding of sums of logarithms in float64


def compare_outputs(mechanism: LinearRecurrence, values: Tensor, outputs: Tensor, initial: Tensor | None) -> None:
    """Compare a recurrence from an initial state (b, h, d, e) with the outputs (b, h, t, e) of some batch rows and heads.

    Raises UnreadableError if they differ.
    """
    b, h, t = outputs.shape[:3]
    chosen = torch.linspace(0, b * h - 1, min(PLANES, b * h), device=outputs.device).long()
    batch, heads = chosen // h, chosen % h

    def select(x: Tensor) -> Tensor:
        return x[batch if len(x) > 1 else batch * 0, heads // (h // x.shape[1])].double()

    parts = {name: select(x) for name, x in mechanism.tensors.items()}
    found, size = run_recurrence(parts, select(values), None if initial is None else select(initial), mechanism.is_strict)
    eps = max(EXACT, *(torch.finfo(x.dtype).eps for x in (outputs, values, *mechanism.tensors.values())))
    difference = (found - select(outputs)).abs().nan_to_num(0)  # not where the model's own output is NaN
    if bool((difference > (ROUNDINGS + 4 * t) * eps * size).any()):
        raise UnreadableError(OTHERWISE.format(float(difference.amax())))


def run_recurrence(parts: dict[str, Tensor], values: Tensor, initial: Tensor | None, is_strict: bool) -> tuple[Tensor, Tensor]:
    """Run a recurrence over values (n, t, e); return its outputs and the sums of the sizes of their terms.

    A strict one reads the state of the token before, to which `skip` adds the value of its own.
    """
    n, t, e = values.shape
    decay = (parts["decay"] * parts.get("rates", 1.0)).exp().expand(n, t, -1).unsqueeze(3)
    q, k = (parts[name].expand(n, t, -1).unsqueeze(3) for name in ("q", "k"))
    ones = values.new_ones(n, 1)
    scale, skip = (
        x.expand(n, t)[..., None, None] for x in (parts.get("key_scale", parts.get("beta", ones)), parts.get("skip", 0 * ones))
    )
    state = values.new_zeros(n, q.shape[2], e) if initial is None else initial
    bound, outputs, sizes = state.abs(), [], []
    for i in range(t):
        before, bound_before, value = state, bound, values[:, i, None]
        state, bound = decay[:, i] * state, decay[:, i] * bound
        if "beta" in parts:
            value = value - k[:, i].mT @ state
        write = scale[:, i] * k[:, i] * value
        state, bound = state + write, bound + write.abs()
        own = skip[:, i] * values[:, i, None]
        outputs.append((q[:, i] * (before if is_strict else state)).sum(1) + own.squeeze(1))
        sizes.append((q[:, i].abs() * (bound_before if is_strict else bound)).sum(1) + own.abs().squeeze(1))
    return torch.stack(outputs, 1), torch.stack(sizes, 1)
