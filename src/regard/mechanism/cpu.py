"""Attention on a CPU by compiled loops, forward and backward: float32 or bfloat16, one contiguous key range per query.

torch's own kernel computes all other cases, and is the reference for these loops.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.compiled import kernel_choice, threads
from regard.compiled.dispatch_guard import NUMBA_DTYPES, can_bypass_dispatch, is_plain_tensor
from regard.mechanism.mask_algebra import EVERYTHING, KeyRanges
from regard.mechanism.masks import Causal
from regard.mechanism.request import Request

MOST = 2**15  # keys up to which these loops were measured to be faster: a block of scores grows with them
LEAST = 2**19  # weights of all heads together; for fewer, compiling the loops (some seconds, once) does not pay
FEW = 2**13  # LEAST for a gradient in bfloat16, which torch's kernel takes longer to prepare than to compute


def find_supported_ranges(request: Request) -> KeyRanges | None:
    """Return the one contiguous key range of each query if the compiled loops support this request, otherwise None."""
    q, k, v = request.q, request.k, request.v
    if not can_bypass_dispatch() or q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] < FEW or q.dtype not in NUMBA_DTYPES:
        return None  # the quick checks first: this runs before every call
    if not (is_plain_tensor(q) and is_plain_tensor(k) and is_plain_tensor(v)):
        return None
    has_terms = request.softcap is not None or request.bias is not None or request.sinks is not None or request.dropout > 0
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    count = q.shape[:3].numel() * k.shape[2]
    least = FEW if learns and q.dtype == torch.bfloat16 else LEAST
    if has_terms or not isinstance(request.offset, int) or not count >= least or k.shape[2] > MOST:
        return None
    if not kernel_choice.is_attention_compiled() or (count >= LEAST and is_torch_faster(request, learns)):
        return None
    return request.mask.find_key_ranges(q.shape[2], k.shape[2], request.offset)


def is_torch_faster(request: Request, learns: bool) -> bool:
    """Return whether torch's kernel is faster than the compiled loops on this processor, see `kernel_choice`."""
    is_whole = request.mask == EVERYTHING
    is_one_call = is_whole or is_causal_from_first_key(request)
    return kernel_choice.is_torch_attention_faster(request.q.dtype, is_one_call, is_whole, learns)


def is_causal_from_first_key(request: Request) -> bool:
    """Return whether the mask is causal and the first query is at the first key, as torch's kernel has it with is_causal."""
    return request.mask == Causal() and isinstance(request.offset, int) and not request.offset


def run_compiled_attention(request: Request, seen: KeyRanges) -> Tensor:
    """Compute the context of a request whose queries see these key ranges."""
    context: Tensor = CompiledAttention.apply(request.q, request.k, request.v, seen, request.scale)  # type: ignore[no-untyped-call]
    return context


class CompiledAttention(torch.autograd.Function):
    """softmax(scale q kᵀ) v with one contiguous key range per query; the weights are recomputed for the gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stretches: KeyRanges, scale: float) -> Tensor:
        """Compute the context (b, h, q, e), stored in memory as (b, q, h, e)."""
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (b, h, t, _), e = q.shape, v.shape[3]
        out, lse = q.new_empty(b, t, h, e), q.new_empty(b, h, t, dtype=torch.float32)
        launch_loops("make_forward_callback", q, k, v, stretches, scale, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse, *stretches)
        ctx.scale = scale
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k and v."""
        q, k, v, out, lse, *ends = ctx.saved_tensors
        stretches = ends[0], ends[1]
        grad = grad.to(q.dtype)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        like = [x.transpose(1, 2) for x in (q, k, v)]
        grads = [x.new_empty(x.shape) for x in like]
        names = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        launch_loops("make_backward_callback", q, k, v, stretches, ctx.scale, out=out, lse=lse, grad=grad, **names)
        return *(x.transpose(1, 2) for x in grads), None, None


def launch_loops(
    name: str, q: Tensor, k: Tensor, v: Tensor, stretches: KeyRanges, scale: float, grad: Tensor | None = None, **arrays: Tensor
) -> None:
    """Run one of the two compiled functions on torch's threads."""
    from regard.mechanism.compiled import dot_product  # imports numba, which is installed if this is called

    (b, h, t, d), (_, g, keys, e) = q.shape, v.shape
    tensors = (q, k, v) if grad is None else (q, k, v, grad)
    strides = (ctypes.c_int64 * 12)(*(x.stride(axis) for x in tensors for axis in (0, 1, 2)))
    work = getattr(dot_product, name)(NUMBA_DTYPES[q.dtype])
    sizes = {"b": b, "h": h, "g": g, "q_tokens": t, "k_tokens": keys, "d": d, "e": e, "ranges": len(stretches[0])}
    ends = {"first_keys": stretches[0], "stop_keys": stretches[1]}
    count = min(torch.get_num_threads(), b * g)
    threads.run_callback(work, count, **sizes, strides=strides, **ends, q=q, k=k, v=v, grad=grad, scale=scale, **arrays)
