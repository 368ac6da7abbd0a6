"""Bahdanau's additive attention of queries and keys already projected to one width, and its steps."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from regard.compiled import threads
from regard.compiled.dispatch_guard import can_bypass_dispatch, is_plain_tensor
from regard.errors import ConfigError, ShapeError
from regard.mechanism import heads, scores
from regard.mechanism.arguments import check_floating
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.masks import Given
from regard.mechanism.request import Request, disable_autocast, make_request
from regard.mechanism.steps import Steps, compute_steps_from_scores, restore_step_ranks

MAX_TANHS = 2**24  # largest number of entries of tanh(q + k) at a time
LEAST = 2**16  # entries from which compiling the loops (some seconds, once) pays


def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0
) -> Tensor:
    """Compute softmax(weightᵀ tanh(q + k)) v.

    Shapes: q (b, h, q, n); k (b, g, k, n); v (b, g, k, e); weight (n,), as in attend; q, k and v also without b, or without b
    and h. Half-precision input: float32 from scores to softmax. torch.autocast has no effect, as it would speed up nothing.
    Long queries are computed in blocks, so that the (q, k, n) numbers within the tanh never exist at once.
    Source: Bahdanau et al. 2014, appendix A.1.2.
    """
    if has_torch_function((q, k, v, weight)):  # torch's protocol for function modes and tensor subclasses
        context: Tensor = handle_torch_function(additive_attention, (q, k, v, weight), q, k, v, weight, mask, offset=offset)
        return context
    with disable_autocast(q.device):
        request = make_additive_request(q, k, v, weight, mask, offset)
        rows = max(1, MAX_TANHS // max(1, request.k.shape[2] * request.q.shape[0] * request.q.shape[1] * len(weight)))
        is_one_block = rows >= request.q.shape[2]
        return request.restore_rank(
            compute_additive_context(request, weight) if is_one_block else compute_in_blocks(request, weight, rows)
        )


def attend_additive(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0) -> Steps:
    """Compute softmax(weightᵀ tanh(q + k)) v and return every step; the scores are not scaled.

    Shapes are those of `additive_attention`.
    """
    with disable_autocast(q.device):
        request = make_additive_request(q, k, v, weight, mask, offset)
        return restore_step_ranks(compute_additive_steps(request, weight), request)


def make_additive_request(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask, offset: Offset) -> Request:
    """Return the request of additive attention on four axes, or raise ShapeError or ConfigError."""
    request = make_request(q, k, v, mask, scale=1.0, offset=offset)
    if check_floating("weight", weight).device != q.device:
        raise ConfigError(f"weight must be on q's device, {q.device}; got {weight.device}. Use .to(device).")
    if weight.shape != q.shape[-1:]:
        raise ShapeError(
            f"weight must be (n,), one for each feature of a query: expected {tuple(q.shape[-1:])}, got {tuple(weight.shape)}."
        )
    return request


def compute_additive_steps(request: Request, weight: Tensor) -> Steps:
    """Compute every step of a request."""
    q, k, weight = cast_and_share_heads(request, weight)
    return compute_steps_from_scores(scores.additive(q, k, weight), request)


def compute_additive_context(request: Request, weight: Tensor) -> Tensor:
    """Compute the context of a request, by compiled loops where they apply."""
    q, k, weight = cast_and_share_heads(request, weight)
    if not can_use_loops(q, k, weight):
        return compute_steps_from_scores(scores.additive(q, k, weight), request).context
    found: Tensor = CompiledAdditiveScores.apply(q.contiguous(), k.contiguous(), weight.contiguous())  # type: ignore[no-untyped-call]
    return compute_steps_from_scores(found, request).context


def cast_and_share_heads(request: Request, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and weight in the dtype of the scores, the keys repeated for each query head."""
    exact = scores.score_dtype(request.q.dtype)
    return request.q.to(exact), heads.share(request.k, request.q.shape[1]).to(exact), weight.to(exact)


def can_use_loops(q: Tensor, k: Tensor, weight: Tensor) -> bool:
    """Return whether to use the compiled loops for these tensors."""
    pairs = q.shape[:3].numel() * k.shape[2]
    fits = pairs * len(weight) >= LEAST and q.dtype == torch.float32
    return (
        fits
        and can_bypass_dispatch()
        and is_plain_tensor(q)
        and is_plain_tensor(k)
        and is_plain_tensor(weight)
        and threads.can_run_loops()
    )


def compute_in_blocks(request: Request, weight: Tensor, rows: int) -> Tensor:
    """Compute the context in blocks of queries; intermediate results are recomputed for the gradient, not saved."""
    contexts = []
    places, keys = (torch.arange(n, device=request.q.device) for n in (request.q.shape[2], request.k.shape[2]))
    for q, queries in zip(request.q.split(rows, 2), places.split(rows), strict=True):
        visible = (
            EVERYTHING
            if request.mask == EVERYTHING
            else Given.from_shared_table(request.mask.block(queries, keys, request.offset))
        )
        part = request._replace(q=q, mask=visible, offset=0)
        contexts.append(checkpoint(compute_additive_context, part, weight, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(contexts, 2)


class CompiledAdditiveScores(torch.autograd.Function):
    """weightᵀ tanh(q + k) by compiled loops; the tanh is recomputed for the gradient and never stored."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        """Compute the scores (b, h, q, k)."""
        ctx.save_for_backward(q, k, weight)
        found = q.new_empty(*q.shape[:3], k.shape[2])
        launch_loops("compute_scores", q, k, weight=weight, scores=found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k and weight."""
        q, k, weight = ctx.saved_tensors
        dq, dk, dweight = torch.zeros_like(q), torch.zeros_like(k), q.new_zeros(q.shape[0] * q.shape[1], len(weight))
        launch_loops("compute_gradients", q, k, weight=weight, scores=grad.contiguous(), dq=dq, dk=dk, dweight=dweight)
        return dq, dk, dweight.sum(0)


def launch_loops(name: str, q: Tensor, k: Tensor, **arrays: Tensor) -> None:
    """Run one of the two compiled functions on torch's threads; a thread takes one matrix of queries and keys at a time."""
    from regard.mechanism.compiled import additive as compiled  # imports numba, which is installed if this is called

    units = q.shape[:2].numel()
    sizes = {"units": units, "queries": q.shape[2], "keys": k.shape[2], "width": q.shape[3]}
    threads.run_callback(getattr(compiled, name), min(torch.get_num_threads(), units), **sizes, q=q, k=k, **arrays)
