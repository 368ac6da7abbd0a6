"""How the recurrences of Hugging Face's models are read: which arguments are their queries, keys, decays and gates.

Each reader turns the arguments and the result of one function, as transformers 5 calls it, into a matrix M as factors and the
values v, such that M v is the function's result. The shapes in the docstrings are those of the arguments.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.map.convolution import Convolution
from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.recurrent.linear_attention_readers import (
    capture_lightning,
    finish_lightning,
    read_delta_rule,
    read_lightning,
    read_lightning_state,
    read_mlstm,
    read_rwkv,
    sample_rwkv_state,
)
from regard.observe.interception.recurrent.recurrence_call import Given, RecurrenceFactors, sample_state
from regard.observe.interception.recurrent.state_space_readers import (
    read_mamba2_scan,
    read_mamba2_step,
    read_mamba_scan,
    read_mamba_step,
)
from regard.observe.interception.thread_state import STATE


@dataclass(frozen=True)
class RecurrenceReader:
    """How one function is read: its initial state, before it runs; its factors, from its arguments and its result.

    capture is a context around the run, which adds to the arguments what only the run shows. A call for which can_read is
    false is not a layer of its own. finish returns what the function itself makes of its outputs (b, h, q, e) afterwards.
    """

    read: Callable[[Given, Any], RecurrenceFactors]
    read_state: Callable[[Given], Tensor | None]
    capture: Callable[[Given], AbstractContextManager[None]] = lambda _: nullcontext()
    can_read: Callable[[Given], bool] = lambda _: True
    finish: Callable[[Given, Tensor], Tensor] | None = None


# RG-LRU: each channel is a head (De et al. 2024)


def read_gated_unit(arguments: Given, result: Any) -> RecurrenceFactors:
    """Read a linear scan: hidden_states, recurrent_gate (b, t, c), reset (b, t, 1)."""
    gate = (arguments["recurrent_gate"] * ~arguments["reset"]).transpose(1, 2).unsqueeze(-1)
    output, state = result
    values, outputs = (x.transpose(1, 2).unsqueeze(-1) for x in (arguments["hidden_states"], output))
    decay = gate.float().where(gate > 0, 1).log().masked_fill(gate <= 0, -torch.inf)  # whose gradient is not NaN
    return RecurrenceFactors(LinearRecurrence(decay=decay), values, outputs, sample_state(state))


# Short convolutions: each channel is a head


def read_convolution(arguments: Given, result: Any) -> RecurrenceFactors:
    """Read a causal convolution: hidden_states (b, c, t), with earlier tokens before the new ones; weight (c, w), bias (c,)."""
    weight, bias, new = arguments["weight"], arguments["bias"], count_new_tokens(arguments)
    values, outputs = (x[..., -new:].unsqueeze(-1) for x in (arguments["hidden_states"], result))
    mechanism = Convolution(
        kernel=weight.unsqueeze(0),
        bias=None if bias is None else bias.unsqueeze(0),
        batch=len(values),
        length=new,
    )
    width = weight.shape[1] - 1
    seen = arguments["hidden_states"] if arguments.get("conv_state") is None else arguments["conv_state"]
    return RecurrenceFactors(mechanism, values, outputs, sample_state(F.pad(seen, (width, 0))[..., -width:]))


def read_convolution_state(arguments: Given) -> Tensor | None:
    """Return the tokens before the new ones that a convolution sees. Raises UnreadableError for one with an activation."""
    width = arguments["weight"].shape[1] - 1
    known = arguments.get("conv_state")
    earlier = arguments["hidden_states"][..., : -count_new_tokens(arguments)] if known is None else known
    return sample_state(F.pad(earlier, (width, 0))[..., -width:])


def count_new_tokens(arguments: Given) -> int:
    """Return the number of tokens that the running module was given; a convolution may also be given earlier ones."""
    frame = STATE.frames[-1]
    tokens = next((x for x in (*frame.args, *frame.kwargs.values()) if isinstance(x, Tensor)), None)
    return arguments["hidden_states"].shape[2] if tokens is None else int(tokens.shape[1])


def read_gated_unit_state(arguments: Given) -> Tensor | None:
    """Return a sample of the state that an RG-LRU continues; None if every row is reset at its first token."""
    return None if arguments["reset"][:, 0].all() else sample_state(arguments["recurrent_states"])


CONVOLUTION = RecurrenceReader(
    read_convolution,
    read_convolution_state,
    can_read=lambda given: given["activation"] is None and given["weight"].shape[1] > 1,
)
FUNCTIONS: dict[str, RecurrenceReader] = {  # functions of modelling modules by name
    "mamba_selective_scan": RecurrenceReader(read_mamba_scan, lambda _: None),
    "mamba_selective_state_update": RecurrenceReader(read_mamba_step, lambda given: sample_state(given["state"])),
    "mamba2_chunk_scan": RecurrenceReader(read_mamba2_scan, lambda given: sample_state(given["initial_states"])),
    "mamba2_selective_state_update": RecurrenceReader(read_mamba2_step, lambda given: sample_state(given["state"])),
    **{
        name: RecurrenceReader(read_delta_rule, lambda given: sample_state(given["initial_state"]))
        for name in (
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "chunk_kimi_delta_attention",
            "recurrent_kimi_delta_attention",
        )
    },
    "rwkv_linear_attention": RecurrenceReader(read_rwkv, lambda given: sample_rwkv_state(given["state"])),
    "causal_conv1d_fn": CONVOLUTION,
    "causal_conv1d_update": CONVOLUTION,
}
METHODS: dict[tuple[str, str], RecurrenceReader] = {  # by the end of the name of a class, and the method's name
    ("Rglru", "_rnn_scan"): RecurrenceReader(read_gated_unit, read_gated_unit_state),
    ("LightningAttention", "forward"): RecurrenceReader(
        read_lightning, read_lightning_state, capture_lightning, finish=finish_lightning
    ),
    ("xLSTMBackend", "forward"): RecurrenceReader(
        read_mlstm, lambda given: sample_state(*(given[name] for name in ("c_initial", "n_initial", "m_initial")))
    ),
}
FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")  # kernels from the projections to the output
