"""attn_implementation="regard" of transformers: attention of "sdpa", or the formula where scores have a softcap or sinks.

The op regard::observe is called beside it, so that a model is recorded while it is compiled.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.observe.interception.compiled.observer_op import IMPLEMENTATION, define_op, observe_call
from regard.observe.interception.functions import hf_registry


def register_attention() -> None:
    """Register attn_implementation="regard" with transformers, so that a model is recorded while it is compiled.

    It calls the function of "sdpa", or computes the formula where there is a softcap or sinks, and the op beside it. Call it
    before the model is loaded or built: AutoModel.from_pretrained(folder, attn_implementation="regard"). Raises ConfigError if
    transformers is not imported.
    """
    modelling, masking = sys.modules.get(hf_registry.MODULE), sys.modules.get("transformers.masking_utils")
    if modelling is None or masking is None:
        raise ConfigError("transformers is not imported here: import it before regard.register_attention().")
    define_op()
    modelling.AttentionInterface.register(IMPLEMENTATION, attend_and_observe)
    masking.AttentionMaskInterface.register(IMPLEMENTATION, masking.AttentionMaskInterface()["sdpa"])


def attend_and_observe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does, with a softcap and sinks (h,) or (b, h, q, 1) if there are any; call the op."""
    if sinks is not None:  # of each query: its scores are shifted instead, and the sink is 0
        position_bias = hf_registry.shift_rows({"position_bias": position_bias, "sinks": sinks})
        s_aux = query.new_zeros(query.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = query.shape[2] > 1 and attention_mask is None and causal
    k, v = (x[:, :, : query.shape[2]] if causal else x for x in (key, value))  # further keys are unwritten slots of a cache
    bias = None if position_bias is None else position_bias[..., : k.shape[2]]
    result: tuple[Tensor, None]
    if softcap is None and s_aux is None:
        attend = sys.modules[hf_registry.MODULE].AttentionInterface._global_mapping["sdpa"]
        settings = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias, **kwargs}
        result = attend(module, query, key, value, attention_mask, **settings)
    else:
        context = compute_context(query, k, v, attention_mask, bias, dropout, causal, scaling, softcap, s_aux)
        result = context.transpose(1, 2).contiguous(), None
    bias, s_aux = (None if x is None else x.detach() for x in (bias, s_aux))
    op_settings = dropout, causal, scaling, True, softcap, s_aux, id(module)
    if torch.compiler.is_compiling():
        torch.ops.regard.observe(query.detach(), k.detach(), v.detach(), attention_mask, bias, *op_settings)
    else:  # in code between compiled graphs
        observe_call(query, k, v, attention_mask, bias, *op_settings)
    return result


def compute_context(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(softcap tanh(scale q kᵀ / softcap) + bias, mask; sinks) v, (b, h, q, e), with an entry for each weight.

    The arguments are those of F.scaled_dot_product_attention, and weights are dropped as there; a query that sees no key gets
    zeros. q is (b, h, q, d), k and v are (b, g, k, d), a mask is True where a key is seen or is added, sinks are (h,). The
    softmax is computed in float32 or more, and has no branch that depends on numbers, so that it compiles to one graph.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    keys, dtype = scores.shape[-1], torch.promote_types(q.dtype, torch.float32)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    is_blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(is_blind, 0.0), -1, dtype=dtype).masked_fill(is_blind, 0.0)[..., :keys]
    return torch.matmul(F.dropout(weights.to(q.dtype), dropout), v)
