"""States of all tokens that a parallel scan computes, by whatever operations: known by the recurrence that they satisfy.

A tensor of the shape of decays and of products of keys with values may hold the states ``S_i = a_i S_{i-1} + k_i v_iᵀ``, which
its numbers show, whatever code computed them (https://doi.org/10.1145/7902.7903). Queries then read it as the states of a loop.
"""

from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role
from regard.observe.interception.handwritten.recurrences.outer_products import expand_value, read_factor
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import START, Decay, Product, State, StateLoop, Write
from regard.observe.interception.lookups import IS_TENSOR
from regard.observe.interception.provenance import ModuleFrame

NEAR = 2**12  # roundings of the largest state by which states may differ here; what they give is compared more closely


def may_read_scan(log: StateLog, role: Role | None, args: Any) -> bool:
    """Return False only if no argument of a function can hold the states of a scan: quick."""
    if not log.decay_shapes or role not in (Role.PRODUCT, Role.MULTIPLY):
        return False
    return any(x.shape in log.decay_shapes for x in filter(IS_TENSOR, args))


def follow_scans(log: StateLog, frames: list[ModuleFrame], tensors: list[Tensor]) -> None:
    """Follow those of some tensors that hold the states of a scan."""
    for x in tensors:
        if x.shape in log.decay_shapes and id(x) not in log.traces:
            start_scan(log, frames, x)


def start_scan(log: StateLog, frames: list[ModuleFrame], x: Tensor) -> None:
    """Follow a tensor as the states of all tokens, if it holds those of decays and products that are followed."""
    alive = [(y, trace) for ref, trace, _ in [*log.traces.values()] if (y := ref()) is not None and y.shape == x.shape]
    products = [(y, trace) for y, trace in alive if isinstance(trace, Product) and log.find(y) is trace]
    lengths = frames[-1].list_lengths()
    axes = [n for n in range(x.dim() - 1) if x.shape[n] in lengths and x.shape[n] > 1]
    pairs = [(y, one) for y, one in products if one.is_exponential]
    pairs += [(y.exp(), one) for y, one in products if one.is_plain and x.shape in log.log_shapes and axes]
    for decays, one in pairs if axes else []:
        for written, other in products:
            if not other.is_plain or other.token_factors < 2:
                continue
            axis = next((n for n in axes if is_scan(x, decays, written, n)), None)
            if axis is not None:
                put_scan(log, frames, x, decays, one, other, axis)
                return


def put_scan(
    log: StateLog, frames: list[ModuleFrame], x: Tensor, decays: Tensor, one: Product, other: Product, axis: int
) -> None:
    """Follow a tensor as the states that decays and a product make along an axis."""
    dims = log.table.add_dims(x.shape)
    loop = StateLoop(dims=(*dims[:axis], *dims[axis + 1 :]), shape=(*x.shape[:axis], *x.shape[axis + 1 :]))
    factors = tuple(read_factor(expand_value(y, x), dims) for y in other.factors)
    factor, *exponents = (read_factor(expand_value(y, x), dims) for y in (decays, *one.factors))
    written = Write(START, (Decay(factor, tuple(exponents)),), factors, token_factors=other.token_factors)
    place = loop.add_write(frames, written, x)
    loop.depths[place], loop.last = x.shape[axis], None
    log.loops.append(loop)
    log.put(x, State(loop, (place,), dims, time=dims[axis]))


def is_scan(x: Tensor, decays: Tensor, written: Tensor, axis: int) -> bool:
    """Return whether the first batch row of x is what was written plus, along an axis, what is before it times decays."""
    states, a, b = (y.detach()[:1].movedim(axis, 1) if axis else y.detach().unsqueeze(0) for y in (x, decays, written))
    limit = NEAR * torch.finfo(x.dtype).eps * (states.abs().amax() + b.abs().amax())
    last = torch.addcmul(b[:, -1], a[:, -1], states[:, -2])  # which most other tensors differ in
    if bool((states[:, -1] - last).abs().amax() > limit):
        return False
    expected = torch.addcmul(b[:, 1:], a[:, 1:], states[:, :-1])
    is_first = (states[:, 0] - b[:, 0]).abs().amax() <= limit
    return bool(is_first & ((states[:, 1:] - expected).abs().amax() <= limit))
