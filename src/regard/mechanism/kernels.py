"""The routes by which `attention` computes a context; each takes a Request of four axes. `fused.py` chooses among them."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.mechanism import masks, sinks, spans, steps
from regard.mechanism.request import Request
from regard.mechanism.rule import EVERYTHING, Mask, Rows
from regard.mechanism.spans import Spans

BLOCK = 128  # queries at a time, where a rule is handed over block by block
GAP = 64  # keys between two ranges that are cheaper to compute than to cut out
FEW_KEYS = 16  # below this torch's CPU kernel loses a NaN in a query, unless it is handed a table


def whole(request: Request) -> Tensor:
    """torch's kernel once, with the rule and the bias as one additive table where there are any, and sinks as a key."""
    if request.sinks is not None:
        return whole(sinks.as_key(request))
    q, mask, bias = request.q, request.mask, request.bias
    exact = steps.raised(q[:0]).dtype
    table = None if bias is None else bias.to(exact)
    if mask != EVERYTHING:
        rows, columns = (torch.arange(n, device=q.device) for n in (q.shape[2], request.k.shape[2]))
        hidden = ~mask.block(rows, columns, request.offset)
        table = torch.zeros(hidden.shape, dtype=exact, device=q.device) if table is None else table
        table = table.masked_fill(hidden, -torch.inf)
    return sdpa(request, table)


def causal(request: Request) -> Tensor:
    """torch's kernel with its own causal mask, which is aligned to the first query and the first key."""
    return sdpa(request, None, is_causal=True)


def blocks(request: Request) -> Tensor:
    """torch's kernel on a run of queries at a time, each with only the keys that the rule may let it see."""
    return by_runs(request, whole)


def written(request: Request) -> Tensor:
    """The formula written out, all q x k weights at once."""
    return steps.walk(request).context


def written_in_blocks(request: Request) -> Tensor:
    """The formula written out for a run of queries at a time; its weights are computed again for the gradient, not kept."""
    return by_runs(request, lambda part: checkpoint(written, part, use_reentrant=False))


def by_runs(request: Request, kernel: Callable[[Request], Tensor]) -> Tensor:
    """A kernel applied to a run of queries at a time."""
    q, mask, offset = request.q, request.mask, request.offset
    keys = request.k.shape[2]
    cut_k, cut_v = cutter(request.k), cutter(request.v)
    contexts = []
    for rows in runs_of_queries(request):
        may = spans.aligned(spans.coalesce(mask.may(rows, keys), GAP), BLOCK, keys)
        visible: Mask = EVERYTHING
        if not spans.covers(mask.must(rows, keys), may):
            queries, columns = (torch.arange(*ends, device=q.device) for ends in ((rows.start, rows.stop), (keys,)))
            visible = masks.Given(mask.block(queries, cut(columns, may, 0), offset))
        part = request._replace(
            q=q[:, :, rows.start : rows.stop], k=cut_k(may), v=cut_v(may), mask=visible, bias=cut_bias(request.bias, rows, may)
        )
        contexts.append(kernel(part) if may else written(part))
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, 2)


def sdpa(request: Request, table: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """F.scaled_dot_product_attention on q, k and v as they are, or as it is fast and right on them."""
    q, k, v = request.q, request.k, request.v
    width = v.shape[3]
    if q.device.type == "cpu":
        if width != q.shape[3]:  # its fast kernel wants them equal; a column of zeros adds nothing
            most = max(width, q.shape[3])
            q, k, v = (F.pad(x, (0, most - x.shape[3])) for x in (q, k, v))
        if table is None and k.shape[2] < FEW_KEYS:
            table = q.new_zeros(1, 1, q.shape[2] if is_causal else 1, k.shape[2])
            table = table.masked_fill(torch.ones_like(table, dtype=torch.bool).triu(1), -torch.inf) if is_causal else table
            is_causal = False
    elif table is not None:
        blind = (table == -torch.inf).all(-1, keepdim=True)  # other devices' kernels need not give 0 for these
        table = table.masked_fill(blind, 0)
    context = F.scaled_dot_product_attention(
        q, k, v, table, is_causal=is_causal, scale=request.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if table is not None and q.device.type != "cpu":
        context = context.masked_fill(blind, 0)
    return context if context.shape[3] == width else context[..., :width]


def runs_of_queries(request: Request) -> Iterator[Rows]:
    """Runs of BLOCK queries; one run of them all where the rule and the bias are the same for each."""
    queries, offset = request.q.shape[2], request.offset
    same = not request.mask.by_row and (request.bias is None or request.bias.shape[2] == 1)
    least, greatest = (offset, offset) if isinstance(offset, int) else (int(offset.min()), int(offset.max()))
    step = queries if same and request.softcap is None else BLOCK
    for start in range(0, queries, step):
        yield Rows(start, min(start + step, queries), least, greatest)


def cutter(x: Tensor) -> Callable[[Spans], Tensor]:
    """A function from ranges of whole blocks to those keys of x (b, g, k, d).

    Where a gradient is wanted the ranges are joined from blocks that were split off once, since the gradient of
    every slice would be a tensor of zeros as long as x.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return lambda ranges: cut(x, ranges, 2)
    split = x.split(BLOCK, 2)
    return lambda ranges: torch.cat(
        [part for i, j in ranges for part in split[i // BLOCK : -(-j // BLOCK)]] or [x[:, :, :0]], 2
    )


def cut(x: Tensor, ranges: Spans, axis: int) -> Tensor:
    """These ranges of x along an axis, one after the other."""
    if ranges == ((0, x.shape[axis]),):
        return x
    parts = [x.narrow(axis, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0)


def cut_bias(bias: Tensor | None, rows: Rows, ranges: Spans) -> Tensor | None:
    """The bias of these queries and keys; an axis of 1 stays."""
    if bias is None:
        return None
    bias = bias if bias.shape[2] == 1 else bias[:, :, rows.start : rows.stop]
    return bias if bias.shape[3] == 1 else cut(bias, ranges, 3)
