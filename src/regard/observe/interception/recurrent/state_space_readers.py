"""Readers of state spaces: the scans of Mamba and Mamba-2, and their single steps."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import Given, RecurrenceFactors, sample_state


def apply_softplus(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return time steps as a state space uses them: with a bias, and made positive."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


# Mamba: each channel is a head with a state of n numbers, which decay at rates of their own (Gu and Dao 2023)


def read_mamba_scan(given: Given, result: Any) -> RecurrenceFactors:
    """Read a selective scan: hidden_states, dt, z (b, c, t), A (c, n), B, C (b, n, t), D (c,), delta_bias (c,)."""
    bias = given["delta_bias"]
    dt = apply_softplus(given["dt"], None if bias is None else bias.unsqueeze(-1), given["delta_softplus"])
    q, k = (given[name].transpose(1, 2).unsqueeze(1) for name in ("C", "B"))
    mechanism = build_state_space(given["A"], dt, q, k, given["D"], given["z"])
    output, state = result if isinstance(result, tuple) else (result, None)
    return RecurrenceFactors(mechanism, given["hidden_states"].unsqueeze(-1), output.unsqueeze(-1), sample_state(state))


def read_mamba_step(given: Given, result: Any) -> RecurrenceFactors:
    """Read one step: state (b, c, n), hidden_states, dt, z (b, c), A (c, n), B, C (b, n), D (c,), dt_bias (c,)."""
    dt = apply_softplus(given["dt"], given["dt_bias"], given["dt_softplus"]).unsqueeze(-1)
    q, k = (given[name][:, None, None] for name in ("C", "B"))
    z = None if given["z"] is None else given["z"].unsqueeze(-1)
    mechanism = build_state_space(given["A"], dt, q, k, given["D"], z)
    values, outputs = (x[:, :, None, None] for x in (given["hidden_states"], result))
    return RecurrenceFactors(mechanism, values, outputs, sample_state(given["state"]))


def build_state_space(
    rates: Tensor, dt: Tensor, q: Tensor, k: Tensor, skip: Tensor | None, z: Tensor | None
) -> LinearRecurrence:
    """Build the recurrence of Mamba: rates (c, n), dt, z (b, c, t), q, k (b, 1, t, n), skip (c,)."""
    return LinearRecurrence(
        decay=dt.unsqueeze(-1),
        rates=rates[None, :, None],
        q=q,
        k=k,
        key_scale=dt,
        skip=None if skip is None else skip[None, :, None],
        gate=None if z is None else F.silu(z),
    )


# Mamba-2: heads with one decay each, groups of heads with the same queries and keys (Dao and Gu 2024)


def read_mamba2_scan(given: Given, result: Any) -> RecurrenceFactors:
    """Read a chunked scan: hidden_states (b, t, h, p), dt (b, t, h), A (h,), B, C (b, t, g, n), D, dt_bias (h,)."""
    dt = apply_softplus(given["dt"], given["dt_bias"], given["dt_softplus"]).clamp(*given["dt_limit"]).transpose(1, 2)
    q, k = (given[name].transpose(1, 2) for name in ("C", "B"))
    mechanism = build_scalar_state_space(given["A"], dt, q, k, given["D"])
    output, state = result if isinstance(result, tuple) else (result, None)
    values, outputs = (x.transpose(1, 2) for x in (given["hidden_states"], output))
    return RecurrenceFactors(mechanism, values, outputs, sample_state(state))


def read_mamba2_step(given: Given, result: Any) -> RecurrenceFactors:
    """Read one step: state (b, h, p, n), hidden_states, dt, z (b, h, p), A (h, p, n), B, C (b, g, n), D, dt_bias (h, p)."""
    dt = apply_softplus(given["dt"], given["dt_bias"], given["dt_softplus"])
    skip = given["D"]
    for x in (dt, given["A"].flatten(1), *([] if skip is None else [skip])):
        if not torch.equal(x, x[..., :1].expand_as(x)):
            raise UnreadableError("its step has decays that differ within a head")
    q, k = (given[name].unsqueeze(2) for name in ("C", "B"))
    mechanism = build_scalar_state_space(given["A"][:, 0, 0], dt[..., :1], q, k, None if skip is None else skip[:, 0])
    values, outputs = (x.unsqueeze(2) for x in (given["hidden_states"], result))
    gates = None if given["z"] is None else F.silu(given["z"]).unsqueeze(2)
    return RecurrenceFactors(mechanism, values, outputs, sample_state(given["state"]), gates)


def build_scalar_state_space(rates: Tensor, dt: Tensor, q: Tensor, k: Tensor, skip: Tensor | None) -> LinearRecurrence:
    """Build the recurrence of Mamba-2: rates and skip (h,), dt (b, h, t), q and k (b, g, t, n)."""
    return LinearRecurrence(
        decay=dt.unsqueeze(-1),
        rates=rates[None, :, None, None],
        q=q,
        k=k,
        key_scale=dt,
        skip=None if skip is None else skip[None, :, None],
    )
