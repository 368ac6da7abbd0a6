"""additive_attention: Bahdanau's attention, of queries and keys already projected to one width; and every step of it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from regard.compiled import threads
from regard.compiled.watched import plain, unwatched
from regard.errors import ConfigError, ShapeError
from regard.mechanism import heads, scores
from regard.mechanism.arguments import check_floating
from regard.mechanism.masks import Given
from regard.mechanism.request import Request, ask, exactly
from regard.mechanism.rule import EVERYTHING, Mask, Offset
from regard.mechanism.steps import Steps, finish, restored

ROOM = 2**24  # numbers of tanh(q + k) at a time
LEAST = 2**16  # of them, for which it is worth to compile the loops, some seconds the first time


def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0
) -> Tensor:
    """softmax(weightᵀ tanh(q + k)) v.

    Shapes: q (b, h, q, n); k (b, g, k, n); v (b, g, k, e); weight (n,), as in attend, and q, k and v without b, or b and h.
    Half-precision input: float32 from scores to softmax. torch.autocast rounds nothing here, where there is no product to
    gain by it. Long queries go a run at a time, so that the (q, k, n) numbers within the tanh are never there at once.
    Source: Bahdanau et al. 2014, appendix A.1.2.
    """
    if has_torch_function((q, k, v, weight)):  # torch's own protocol: a mode of functions may look on
        watched: Tensor = handle_torch_function(additive_attention, (q, k, v, weight), q, k, v, weight, mask, offset=offset)
        return watched
    with exactly(q.device):
        request = asked(q, k, v, weight, mask, offset)
        rows = max(1, ROOM // max(1, request.k.shape[2] * request.q.shape[0] * request.q.shape[1] * len(weight)))
        whole = rows >= request.q.shape[2]
        return request.restore(context_of(request, weight) if whole else by_runs(request, weight, rows))


def attend_additive(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask = EVERYTHING, *, offset: Offset = 0) -> Steps:
    """The same with every step kept; the scores are the network's, and are not divided by anything."""
    with exactly(q.device):
        request = asked(q, k, v, weight, mask, offset)
        return restored(walk(request, weight), request)


def asked(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, mask: Mask, offset: Offset) -> Request:
    """The request on four axes, or ShapeError or ConfigError."""
    request = ask(q, k, v, mask, scale=1.0, offset=offset)
    if check_floating("weight", weight).device != q.device:
        raise ConfigError(f"weight must be on q's device, {q.device}; got {weight.device}. Use .to(device).")
    if weight.shape != q.shape[-1:]:
        raise ShapeError(
            f"weight is (n,), one for each number of a query: expected {tuple(q.shape[-1:])}, got {tuple(weight.shape)}."
        )
    return request


def walk(request: Request, weight: Tensor) -> Steps:
    """The steps of a request."""
    q, k, weight = scored(request, weight)
    return finish(scores.additive(q, k, weight), request)


def context_of(request: Request, weight: Tensor) -> Tensor:
    """The last of them, by compiled loops where these can."""
    q, k, weight = scored(request, weight)
    if not quick(q, k, weight):
        return finish(scores.additive(q, k, weight), request).context
    found: Tensor = Compiled.apply(q.contiguous(), k.contiguous(), weight.contiguous())  # type: ignore[no-untyped-call]
    return finish(found, request).context


def scored(request: Request, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and weight in the dtype of the scores, a head of keys for each of queries."""
    exact = scores.wide(request.q.dtype)
    return request.q.to(exact), heads.share(request.k, request.q.shape[1]).to(exact), weight.to(exact)


def quick(q: Tensor, k: Tensor, weight: Tensor) -> bool:
    """Whether the compiled loops are for these."""
    pairs = q.shape[:3].numel() * k.shape[2]
    fits = pairs * len(weight) >= LEAST and q.dtype == torch.float32
    return fits and unwatched() and plain(q) and plain(k) and plain(weight) and threads.usable()


def by_runs(request: Request, weight: Tensor, rows: int) -> Tensor:
    """The context, some queries at a time; what is computed on the way is computed again for the gradient, not kept."""
    contexts = []
    places, keys = (torch.arange(n, device=request.q.device) for n in (request.q.shape[2], request.k.shape[2]))
    for q, queries in zip(request.q.split(rows, 2), places.split(rows), strict=True):
        visible = EVERYTHING if request.mask == EVERYTHING else Given.sharing(request.mask.block(queries, keys, request.offset))
        part = request._replace(q=q, mask=visible, offset=0)
        contexts.append(checkpoint(context_of, part, weight, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(contexts, 2)


class Compiled(torch.autograd.Function):
    """weightᵀ tanh(q + k) by loops of our own, which compute the tanh again for the gradient: it is nowhere in memory."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        """The scores (b, h, q, k)."""
        ctx.save_for_backward(q, k, weight)
        found = q.new_empty(*q.shape[:3], k.shape[2])
        call("ahead", q, k, weight, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and weight."""
        q, k, weight = ctx.saved_tensors
        grads = torch.zeros_like(q), torch.zeros_like(k), q.new_zeros(q.shape[0] * q.shape[1], len(weight))
        call("back", q, k, weight, grad.contiguous(), *grads)
        return grads[0], grads[1], grads[2].sum(0)


def call(name: str, q: Tensor, k: Tensor, *others: Tensor) -> None:
    """Runs one of the two functions on torch's threads, each of which takes one matrix of queries and keys at a time."""
    from regard.mechanism.compiled import additive as compiled  # and numba with it, which is there where this is reached

    units = q.shape[:2].numel()
    said = [0, units, q.shape[2], k.shape[2], q.shape[3], *(x.data_ptr() for x in (q, k, *others))]
    said += [0] * (compiled.SAID - len(said))
    threads.run(getattr(compiled, name), said, min(torch.get_num_threads(), units))
