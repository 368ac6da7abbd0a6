"""Attention by the fastest kernel that fits, and the reason for the choice."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard.compiled.dispatch_guard import computes_tangents
from regard.mechanism import cpu, flex, kernels
from regard.mechanism.kernels import can_hold_sinks
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.masks import Causal
from regard.mechanism.request import Request, make_request
from regard.mechanism.steps import is_finite


@dataclass(frozen=True)
class Choice:
    """The name of a kernel, and the reason for choosing it in a sentence."""

    kernel: str
    reason: str


WHOLE = Choice("sdpa", "every query sees every key, so F.scaled_dot_product_attention needs no mask")
BIASED = Choice("sdpa", "F.scaled_dot_product_attention takes the bias as an additive mask")
CAUSAL = Choice("sdpa causal", "the mask is causal from the first key on: F.scaled_dot_product_attention with is_causal=True")
LOOPS = Choice("compiled", "each query sees one range of keys, for which the loops compiled for this processor are faster")
BLOCKS = Choice("sdpa in blocks", "each block of queries goes to F.scaled_dot_product_attention with only the keys it may see")
FLEX = Choice("flex", "compiled flex_attention skips the blocks that the mask hides, on this device in one launch")
DROPOUT = Choice("written out", "dropout draws once for all the weights, which no fused kernel reproduces")
EMPTY = Choice("written out", "there are no queries or no keys, so there is nothing to speed up")
WITH_SINKS = Choice(
    "sdpa", "every query sees every key and the sinks, which F.scaled_dot_product_attention takes as one more key"
)
CAPPED = Choice(
    "written out in blocks",
    "no kernel of torch on this device has a softcap: the formula is computed block by block of queries",
)
UNSCALED = Choice(
    "written out in blocks",
    "with a scale so near 0 no key can represent the sinks: the formula is computed block by block of queries",
)
ZERO = Choice(
    "written out in blocks", "with a scale of 0 a kernel misses products that overflow, for which the formula gives NaN"
)
TANGENTS = Choice("written out in blocks", "forward-mode AD needs the derivative of every step, which no fused kernel has")

KERNELS: dict[str, Callable[[Request], Tensor]] = {
    "sdpa": kernels.run_sdpa,
    "sdpa causal": kernels.run_causal_sdpa,
    "sdpa in blocks": kernels.run_sdpa_in_blocks,
    "flex": flex.run_flex,
    "written out": kernels.run_formula,
    "written out in blocks": kernels.run_formula_in_blocks,
}


HALF_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_SCORE = 1e38  # in float32, the dtype of half precision's scores


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: Offset = 0,
    dropout: float = 0.0,
) -> Tensor:
    """Compute the context of `attend` with the fastest kernel that can express the request.

    Arguments, shapes and errors are those of attend; `choose` returns the kernel. A mask is not expanded to a q x k table:
    one block of queries at a time is computed with the keys it may see; on a GPU only the blocks that it cuts are tables.
    Infinities and NaN come out where attend has
    them, on a CPU in eager mode; on a GPU, or compiled, checking for them would force a synchronization. Gradients are once
    differentiable. Under forward-mode AD, as in torch.func.jvp, the formula is computed block by block of queries.
    """
    if has_torch_function((q, k, v)):  # torch's protocol for function modes and tensor subclasses
        settings: dict[str, Any] = {
            "scale": scale,
            "softcap": softcap,
            "bias": bias,
            "sinks": sinks,
            "offset": offset,
            "dropout": dropout,
        }
        output: Tensor = handle_torch_function(attention, (q, k, v), q, k, v, mask, **settings)
        return output
    request = simplify_request(make_request(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout))
    seen = cpu.find_supported_ranges(request)
    kernel = LOOPS.kernel if seen else select_torch_kernel(request).kernel
    if q.device.type != "cpu" or not kernel.startswith(("sdpa", "compiled")):
        return request.restore_rank(KERNELS[kernel](request))
    if not seen and can_lose_nan(request):
        return request.restore_rank(kernels.run_formula_in_blocks(request))
    context = cpu.run_compiled_attention(request, seen) if seen else KERNELS[kernel](request)
    if not (torch.compiler.is_compiling() or is_finite(select_rows_to_check(context, kernel, request))):
        context = kernels.run_formula_in_blocks(request)  # torch's kernel spreads a non-finite hidden key to every row
    return request.restore_rank(context)


def can_lose_nan(request: Request) -> bool:
    """Return whether a score may be infinite or NaN and torch's kernel for half precision or few keys would lose it.

    No product is larger than d max|q| max|k|, and no score than scale times that, plus the bias.
    """
    is_half, has_few_keys = request.q.dtype in HALF_DTYPES, request.k.shape[2] < kernels.FEW_KEYS
    if torch.compiler.is_compiling() or not (is_half or (has_few_keys and request.bias is not None)):
        return False
    try:
        largest = (
            max(abs(request.scale), 1.0)
            * request.q.shape[3]
            * find_largest_magnitude(request.q)
            * find_largest_magnitude(request.k)
        )
        return not (largest + (0.0 if request.bias is None else max(request.bias.detach().amax().item(), 0.0)) < LARGEST_SCORE)
    except RuntimeError:  # under vmap, on the meta device
        return False


def find_largest_magnitude(x: Tensor) -> float:
    """Return the largest absolute value in one pass; NaN if x holds one."""
    return max(abs(end.item()) for end in torch.aminmax(x.detach()))


def select_rows_to_check(context: Tensor, kernel: str, request: Request) -> Tensor:
    """Return the rows of the context to check: one of them is not finite if an infinity or a NaN has spread.

    For torch's own causal mask this is the last row, which sees every key: only what is not finite there can spread.
    """
    queries, keys = request.q.shape[2], request.k.shape[2]
    last_sees_all = kernel == "sdpa causal" and queries >= keys >= kernels.FEW_KEYS
    return context.select(2, -1) if last_sees_all else context


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: Offset = 0,
    dropout: float = 0.0,
) -> Choice:
    """Return the kernel that `attention` uses for these arguments, and the reason."""
    request = simplify_request(make_request(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout))
    return LOOPS if cpu.find_supported_ranges(request) else select_torch_kernel(request)


def simplify_request(request: Request) -> Request:
    """Drop a causal mask that hides nothing, as when the last token is the only query."""
    offset, last = request.offset, request.k.shape[2] - 1
    hides_nothing = isinstance(offset, int) and offset >= last and request.mask == Causal()
    return request._replace(mask=EVERYTHING) if hides_nothing else request


def select_torch_kernel(request: Request) -> Choice:
    """Return the fastest of torch's kernels that can express a request, or the formula step by step."""
    if not request.k.shape[2] or not request.q.numel():
        return EMPTY
    if request.dropout:
        return DROPOUT
    if computes_tangents():
        return TANGENTS
    if not request.scale:
        return ZERO
    sinks, bias = request.sinks is not None, request.bias is not None
    written = request.softcap is not None or (sinks and not can_hold_sinks(request.scale, request.q.dtype))
    if request.mask == EVERYTHING and not written:
        return WITH_SINKS if sinks else BIASED if bias else WHOLE
    if cpu.is_causal_from_first_key(request) and not (written or sinks or bias):
        return CAUSAL
    if flex.is_flex_preferred(request):
        return FLEX
    return BLOCKS if not written else CAPPED if request.softcap is not None else UNSCALED
