"""Readers of linear attention: delta rules, RWKV, mLSTM and lightning attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.recurrent.recurrence_call import Given, RecurrenceFactors, sample_state

CHUNK = 64  # tokens whose normalizers are computed together


# Delta rules: gated delta nets (Yang et al. 2024), and Kimi's delta attention, with a decay for each channel of the keys


def read_delta_rule(given: Given, result: Any) -> RecurrenceFactors:
    """Read a delta rule: query, key (b, t, g, d), value (b, t, h, e), g (b, t, h) or (b, t, h, d), beta (b, t, h)."""
    q, k = (given[name].transpose(1, 2).float() for name in ("query", "key"))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = given["g"].transpose(1, 2).float()
    mechanism = LinearRecurrence(
        decay=decay if decay.dim() == 4 else decay.unsqueeze(-1),
        q=q * q.shape[3] ** -0.5,
        k=k,
        beta=given["beta"].transpose(1, 2).float(),
    )
    output, state = result
    values, outputs = (x.transpose(1, 2) for x in (given["value"], output))
    return RecurrenceFactors(mechanism, values, outputs, sample_state(state))


# RWKV-4: each channel is a head, whose rows are positive and sum to 1 (Peng et al. 2023)


def read_rwkv(given: Given, result: Any) -> RecurrenceFactors:
    """Read RWKV's attention: time_decay, time_first (c,), key, value (b, t, c); its state is (numerator, denominator, max)."""
    key = given["key"].transpose(1, 2).double()
    rate, bonus = -given["time_decay"].double().exp().unsqueeze(-1), given["time_first"].double().unsqueeze(-1)
    before = torch.full_like(key[..., :1], -torch.inf)
    if given["state"] is not None:
        _, denominator, most = given["state"]
        before = (denominator.double().log() + most.double()).unsqueeze(-1)
    steps = torch.arange(key.shape[2], device=key.device, dtype=key.dtype)
    # the log of the sum over earlier tokens, at each token and after the last
    earlier = torch.cat([before, key - rate * (steps + 1)], 2).logcumsumexp(2)[..., :-1] + rate * steps
    logs = torch.logaddexp(earlier, key + bonus)
    dtype = torch.promote_types(given["key"].dtype, torch.float32)
    mechanism = LinearRecurrence(
        decay=key.new_ones(1, 1, 1, 1, dtype=dtype),
        rates=rate[None, ..., None].to(dtype),
        key_logs=key.to(dtype),
        row_logs=(-rate - logs).to(dtype),
        skip=(key + bonus - logs).exp().to(dtype),
        is_strict=True,
    )
    output, state = result
    values, outputs = (x.transpose(1, 2).unsqueeze(-1) for x in (given["value"], output))
    return RecurrenceFactors(mechanism, values, outputs, None if state is None else sample_rwkv_state(state))


def sample_rwkv_state(state: Any) -> Tensor | None:
    """Return a sample of RWKV's state: its numerator and denominator, 0 before the first token, and their scale."""
    return None if state is None else sample_state(state[1], state[0], state[2])


# mLSTM: an input gate without a bound, so that rows are divided by a normalizer (Beck et al. 2024)


def read_mlstm(given: Given, result: Any) -> RecurrenceFactors:
    """Read an mLSTM: query, key, value (b, h, t, d), igate, fgate (b, h, t); its state is (cells, normalizers, scale)."""
    q, k = given["query"] * given["query"].shape[3] ** -0.5, given["key"]
    decay, gains = F.logsigmoid(given["fgate"].float()), given["igate"].float()
    before = given["n_initial"], given["m_initial"]
    norms = compute_normalizers(q, k, decay, gains, before, float(given["self"].config.eps))
    mechanism = LinearRecurrence(decay=decay.unsqueeze(-1), q=q, k=k, key_logs=gains, row_logs=norms.neg().to(gains.dtype))
    output, state = result if isinstance(result, tuple) else (result, None)
    return RecurrenceFactors(mechanism, given["value"], output, None if state is None else sample_state(*state))


def compute_normalizers(
    q: Tensor, k: Tensor, decay: Tensor, gains: Tensor, before: tuple[Tensor | None, Tensor | None], eps: float
) -> Tensor:
    """Compute the log of what divides each row of an mLSTM, (b, h, t): max(|row sum|, 1) + eps e^m, with m the running maximum.

    q and k are (b, h, t, d), decay and gains (b, h, t) logs; before is the normalizer (b, h, d) and its scale m (b, h, 1).
    """
    q, k, decay, gains = (x.double() for x in (q, k, decay, gains))
    total, most = (None if x is None else x.double() for x in before)
    total = q.new_zeros(*q.shape[:2], q.shape[3]) if total is None else total
    most = q.new_zeros(*q.shape[:2], 1) if most is None else most
    found = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        logs = decay[:, :, part].cumsum(2)
        scale = logs + torch.maximum(most, (gains[:, :, part] - logs).cummax(2).values)  # m of each token
        weights = logs.unsqueeze(3) - logs.unsqueeze(2) + gains[:, :, part].unsqueeze(2) - scale.unsqueeze(3)
        weights = weights.masked_fill(weights.new_ones(weights.shape[2:], dtype=torch.bool).triu(1), -torch.inf).exp()
        sums = ((q[:, :, part] @ k[:, :, part].mT) * weights).sum(3)
        sums += (q[:, :, part] @ total.unsqueeze(3)).squeeze(3) * (logs + most - scale).exp()
        found.append(scale + (sums.abs().maximum((-scale).exp()) + eps).log())
        kept = (logs[:, :, -1:] + most - scale[:, :, -1:]).exp()
        total = total * kept + (weights[:, :, -1:] @ k[:, :, part]).squeeze(2)
        most = scale[:, :, -1:]
    return torch.cat(found, 2)


# Lightning attention: linear attention with one constant decay a head (Qin et al. 2024)


@contextmanager
def capture_lightning(given: Given) -> Iterator[None]:
    """Add to the arguments the projections of a lightning attention, its output before the norm, and its initial state."""
    module, cache = given["self"], given["cache"]
    state = None if cache is None else cache.get_linear_cache(module.layer_idx)
    given["initial_state"] = state

    def keep_projections(_: nn.Module, __: Any, output: Tensor) -> None:
        given["projections"] = output

    def keep_output(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given["output"] = inputs[0]

    hooks = module.qkv_proj.register_forward_hook(keep_projections), module.norm.register_forward_pre_hook(keep_output)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def read_lightning(given: Given, result: Any) -> RecurrenceFactors:
    """Read a lightning attention from its projections (b, t, 3 h d), its output (b, t, h d), and its slopes (h, 1, 1)."""
    module, mask = given["self"], given["attention_mask"]
    projected = module.act_fn(given["projections"])
    projected = projected if mask is None else (projected * mask[:, :, None]).to(projected.dtype)
    b, t, _ = projected.shape
    q, k, v = projected.view(b, t, module.num_attention_heads, -1).transpose(1, 2).split(module.head_dim, 3)
    mechanism = LinearRecurrence(decay=module.slope_rate.new_ones(1, 1, 1, 1), rates=-module.slope_rate.unsqueeze(0), q=q, k=k)
    output = given["output"].view(b, t, module.num_attention_heads, -1).transpose(1, 2)
    return RecurrenceFactors(mechanism, v, output, sample_state(result[1]))


def finish_lightning(given: Given, output: Tensor) -> Tensor:
    """Return what a lightning attention makes of its output (b, h, t, d): it is normed, gated and projected, without hooks."""
    module = given["self"]
    normed = module.norm.forward(output.transpose(1, 2).flatten(2))
    gated = F.sigmoid(module.output_gate.forward(given["hidden_states"])) * normed
    projected: Tensor = module.out_proj.forward(gated)
    return projected


def read_lightning_state(given: Given) -> Tensor | None:
    """Return a sample of the state that a lightning attention continues."""
    cache = given["cache"]
    return sample_state(None if cache is None else cache.get_linear_cache(given["self"].layer_idx))
