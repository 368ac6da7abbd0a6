"""The op regard::observe: in compiled code it hands the arguments of an attention call to the watchers that are active.

An op with an effect is neither removed nor moved by torch.compile, and it has no result: what is computed around it stays the
same. Without a watcher it does nothing.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as backward
from torch._library.effects import EffectType

from regard.observe.interception.attention_call import AttentionCall, CallAdapter
from regard.observe.interception.call_dispatch import call_next, explain_error, report_missed
from regard.observe.interception.functions import hf_registry, sdpa
from regard.observe.interception.plain_tensors import disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.token_mixers import COMPILED
from regard.observe.interception.thread_state import STATE

IMPLEMENTATION = "regard"  # the name in transformers' registry
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, float dropout, bool is_causal, float? scale, bool gqa, "
    "float? softcap, Tensor? sinks"
)
KERNEL = "compiled scaled_dot_product_attention"


@dataclass(eq=False)
class CompiledCall:
    """A compiled function that runs: the watched modules that it may run, by id, and the ids of those with an op."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    op_ids: set[int] = field(default_factory=set)
    is_reported: bool = False  # whether a graph of it has reported what no op observes


@cache
def define_op() -> None:
    """Define the op, once."""
    layout = torch.Tag.flexible_layout  # or torch.compile would lay tensors out for the op, and the bits could differ
    schema = f"({ARGUMENTS}, int module) -> ()"
    op = torch.library.custom_op("regard::observe", observe_call, mutates_args=(), schema=schema, tags=layout)
    op.register_fake(lambda *args: None)
    op.register_effect(EffectType.ORDERED)


def observe_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, *settings: Any) -> None:
    """Pass a call in compiled code to the watchers; `settings` are the further arguments of the op."""
    call, module = STATE.compiled_call, settings[-1]
    if call is None or backward() != -1:
        return
    call.op_ids.add(module)
    frames, running = STATE.frames, call.modules.get(module)
    if running is not None:
        frames.append(ModuleFrame(running, frames[-1].watchers if frames else (), (), {}))
    try:
        with disable_modes():
            read = read_call(q, k, v, mask, bias, *settings[:-1])
        read.module = running
        call_next([one for one in STATE.watchers if not one.can_change_calls], read, CallAdapter(lambda: None))
        report_missed(KERNEL, COMPILED, [one for one in STATE.watchers if one.can_change_calls])
    except Exception as error:  # an unreadable call must not stop the model
        report_missed(KERNEL, explain_error(error))
    finally:
        if running is not None:
            frames.pop()


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> AttentionCall:
    """Read the call; a position bias (b or 1, h, q, k) is added to the scores, as transformers passes it; sinks are (h,)."""
    call, _ = sdpa.read_call(lambda: q, q, k, v, None if bias is not None else mask, dropout, is_causal, scale, gqa)
    call.kernel, call.has_separate_sources = KERNEL, None
    call.softcap, call.sinks = softcap, sinks
    if bias is not None:
        call.mask, call.offset, call.bias = hf_registry.infer_mask(mask, is_causal, bias, call.q, call.k)
    return call
