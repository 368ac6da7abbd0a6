"""attention: the same context from torch's kernels; says which it chose, and why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard.mechanism import cpu, flex, kernels
from regard.mechanism.masks import Causal
from regard.mechanism.request import Request, ask
from regard.mechanism.rule import EVERYTHING, Mask, Offset
from regard.mechanism.sinks import holds
from regard.mechanism.steps import is_finite


@dataclass(frozen=True)
class Choice:
    """A kernel by name, and the reason for it in a sentence."""

    kernel: str
    reason: str


WHOLE = Choice("sdpa", "every query sees every key, which F.scaled_dot_product_attention computes as it is")
BIASED = Choice("sdpa", "the bias is handed to F.scaled_dot_product_attention as an additive mask")
CAUSAL = Choice("sdpa causal", "the rule is causal from the first key on, which F.scaled_dot_product_attention knows by name")
LOOPS = Choice("compiled", "each query sees one stretch of keys, for which the loops compiled for this processor are faster")
BLOCKS = Choice("sdpa in blocks", "each run of queries goes to F.scaled_dot_product_attention with only the keys it may see")
FLEX = Choice("flex", "compiled flex_attention skips the blocks that the rule leaves empty, on this device in one launch")
DROPOUT = Choice("written out", "dropout is one draw over all the weights, which no fused kernel repeats")
EMPTY = Choice("written out", "there is no query or no key, and so nothing to be fast about")
SUNK = Choice("sdpa", "every query sees every key and the sinks, which F.scaled_dot_product_attention takes as one more key")
CAPPED = Choice(
    "written out in blocks", "no kernel of torch on this device has a softcap; a run of queries at a time is written out"
)
UNSCALED = Choice(
    "written out in blocks", "with a scale so near 0 no key can hold the sinks; a run of queries at a time is written out"
)

KERNELS: dict[str, Callable[[Request], Tensor]] = {
    "sdpa": kernels.whole,
    "sdpa causal": kernels.causal,
    "sdpa in blocks": kernels.blocks,
    "flex": flex.run,
    "written out": kernels.written,
    "written out in blocks": kernels.written_in_blocks,
}

HALVES = (torch.bfloat16, torch.float16)
LARGEST_SCORE = 1e38  # of float32, in which half precision is scored


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
    """The context of `attend`, from the fastest kernel that can express the request.

    Arguments, shapes and errors are those of attend; `choose` says which kernel takes them. Nothing of size q x k is
    made for a rule: a run of queries at a time meets the keys it may see. An infinity or a NaN comes out where attend has
    one, on a CPU in eager mode; on a GPU, or compiled, looking for one would cost a wait. Gradients are once differentiable.
    """
    if has_torch_function((q, k, v)):  # torch's own protocol: a mode of functions may look on
        settings: dict[str, Any] = {
            "scale": scale,
            "softcap": softcap,
            "bias": bias,
            "sinks": sinks,
            "offset": offset,
            "dropout": dropout,
        }
        watched: Tensor = handle_torch_function(attention, (q, k, v), q, k, v, mask, **settings)
        return watched
    request = simplest(ask(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout))
    seen = cpu.stretches(request)
    kernel = LOOPS.kernel if seen else torchs(request).kernel
    if q.device.type != "cpu" or not kernel.startswith(("sdpa", "compiled")):
        return request.restore(KERNELS[kernel](request))
    if not seen and loses_nan(request):
        return request.restore(kernels.written_in_blocks(request))
    context = cpu.run(request, seen) if seen else KERNELS[kernel](request)
    if not is_finite(telling_rows(context, kernel, request)):
        context = kernels.written_in_blocks(request)  # torch's kernel spreads what a hidden key holds to every row
    return request.restore(context)


def loses_nan(request: Request) -> bool:
    """Return whether a score may be infinite or NaN, of which torch's kernel for half precision or few keys makes a number.

    No score is larger than scale d max|q| max|k|, plus the bias.
    """
    is_half, has_few_keys = request.q.dtype in HALVES, request.k.shape[2] < kernels.FEW_KEYS
    if torch.compiler.is_compiling() or not (is_half or (has_few_keys and request.bias is not None)):
        return False
    try:
        largest = abs(request.scale) * request.q.shape[3] * largest_size(request.q) * largest_size(request.k)
        return not (largest + (0.0 if request.bias is None else max(request.bias.detach().amax().item(), 0.0)) < LARGEST_SCORE)
    except RuntimeError:  # under vmap, on the meta device
        return False


def largest_size(x: Tensor) -> float:
    """The largest absolute value, in one pass; NaN where there is one."""
    return max(abs(end.item()) for end in torch.aminmax(x.detach()))


def telling_rows(context: Tensor, kernel: str, request: Request) -> Tensor:
    """The rows of which one is not finite if an infinity or a NaN has spread.

    Of torch's own causal mask the last row, which sees every key: what is not finite there is the only thing that can spread.
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
    """The kernel that `attention` takes for these arguments, and why."""
    return select(simplest(ask(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout)))


def simplest(request: Request) -> Request:
    """The request without a causal mask that hides nothing, as when the last token alone is a query."""
    offset, last = request.offset, request.k.shape[2] - 1
    hides_nothing = isinstance(offset, int) and offset >= last and request.mask == Causal()
    return request._replace(mask=EVERYTHING) if hides_nothing else request


def select(request: Request) -> Choice:
    """The fastest kernel that can express a request."""
    return LOOPS if cpu.stretches(request) else torchs(request)


def torchs(request: Request) -> Choice:
    """The fastest of torch's kernels that can, or the formula written out."""
    if not request.k.shape[2] or not request.q.numel():
        return EMPTY
    if request.dropout:
        return DROPOUT
    sinks, bias = request.sinks is not None, request.bias is not None
    written = request.softcap is not None or (sinks and not holds(request.scale, request.q.dtype))
    if request.mask == EVERYTHING and not written:
        return SUNK if sinks else BIASED if bias else WHOLE
    from_the_first = request.mask == Causal() and isinstance(request.offset, int) and not request.offset
    if from_the_first and not (written or sinks or bias):
        return CAUSAL
    if flex.suits(request):
        return FLEX
    return BLOCKS if not written else CAPPED if request.softcap is not None else UNSCALED
