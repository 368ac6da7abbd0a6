"""The kernels by which `attention` computes a context; each takes a Request of four axes. `fused.py` chooses among them.

Torch's kernel has no sinks: it gets them as one more key with a value of zeros.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.compiled.dispatch_guard import computes_tangents
from regard.mechanism import masks, spans, steps
from regard.mechanism.mask_algebra import EVERYTHING, Mask, QueryBlock
from regard.mechanism.masks import Given
from regard.mechanism.request import Request
from regard.mechanism.scores import score_dtype
from regard.mechanism.spans import Spans

BLOCK = 128  # queries of a block
GAP = 64  # largest gap between two ranges that is cheaper to compute than to cut out
FEW_KEYS = 16  # below this torch's CPU kernel loses a NaN in a query, unless it gets a table
LARGEST_SINK = 400.0  # a score this far from the others has all of the weight, or none
FLOAT32_PARTS = {torch.bfloat16: 3, torch.float16: 3}  # count of numbers of this dtype that sum to a float32


def run_sdpa(request: Request) -> Tensor:
    """Call torch's kernel once, without a mask or with a Given table; table and bias are passed as one, sinks as a key."""
    if request.sinks is not None:
        return run_sdpa(append_sink_keys(request))
    table = request.bias
    if isinstance(request.mask, masks.Given):
        exact = score_dtype(request.q.dtype)
        hidden = ~request.mask.given
        table = hidden.new_zeros(hidden.shape, dtype=exact) if table is None else table.to(exact)
        table = table.masked_fill(hidden, -torch.inf)
    return apply_sdpa(request, table)


def run_causal_sdpa(request: Request) -> Tensor:
    """Call torch's kernel with its own causal mask, which aligns the first query with the first key."""
    return apply_sdpa(request, None, is_causal=True)


def run_sdpa_in_blocks(request: Request) -> Tensor:
    """Call torch's kernel on one block of queries at a time, with only the keys that the mask may let it see."""
    return run_in_blocks(request, run_sdpa)


def run_formula(request: Request) -> Tensor:
    """Compute the formula step by step, all q x k weights at once."""
    return steps.compute_steps(request).context


def run_formula_in_blocks(request: Request) -> Tensor:
    """Compute the formula one block of queries at a time; weights are recomputed for the gradient, not saved.

    Inside a transform of torch.func or forward-mode AD, which have no checkpoints, they are saved.
    """
    is_transformed = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    can_checkpoint = torch.is_grad_enabled() and not is_transformed and not computes_tangents()
    return run_in_blocks(request, run_checkpointed_formula if can_checkpoint else run_formula)


def run_checkpointed_formula(request: Request) -> Tensor:
    """Compute the formula with activation checkpointing: intermediate results are recomputed for the gradient."""
    # there is no dropout here
    context: Tensor = checkpoint(run_formula, request, use_reentrant=False, preserve_rng_state=False)
    return context


def run_in_blocks(request: Request, kernel: Callable[[Request], Tensor]) -> Tensor:
    """Apply a kernel to one block of queries at a time, with the keys its mask may let it see, and a table if needed.

    torch.export gets the table of all queries: how many blocks there are would fix the length of the exported program.
    """
    mask, offset, keys = request.mask, request.offset, request.k.shape[2]
    device = request.q.device
    if torch.compiler.is_exporting():
        table = mask.block(torch.arange(request.q.shape[2], device=device), torch.arange(keys, device=device), offset)
        return kernel(request._replace(mask=masks.Given.from_shared_table(table), offset=0))
    runs = list(split_queries(request))
    cut_k, cut_v = make_span_selector(request.k), make_span_selector(request.v)
    bias = None if request.bias is None or request.bias.shape[2] == 1 else request.bias.split(runs[0].stop, 2)
    contexts = []
    for n, (rows, q) in enumerate(zip(runs, request.q.split(runs[0].stop, 2), strict=True)):
        may = spans.align_spans(spans.merge_spans(mask.find_possible_keys(rows, keys), GAP), BLOCK, keys)
        visible: Mask = EVERYTHING
        if not spans.is_superset(mask.find_certain_keys(rows, keys), may):
            queries, columns = (torch.arange(*ends, device=device) for ends in ((rows.start, rows.stop), (keys,)))
            visible = masks.Given.from_shared_table(mask.block(queries, select_spans(columns, may, 0), offset))
        added = select_bias_spans(bias[n] if bias else request.bias, may)
        part = request._replace(q=q, k=cut_k(may), v=cut_v(may), mask=visible, bias=added, offset=0)
        contexts.append(kernel(part) if may else run_formula(part))
    return contexts[0] if len(contexts) == 1 else torch.cat(contexts, 2)


def apply_sdpa(request: Request, table: Tensor | None, *, is_causal: bool = False) -> Tensor:
    """Call F.scaled_dot_product_attention with an additive table or none; a query whose keys are all hidden gets 0."""
    if request.q.device.type == "cpu":
        return apply_cpu_sdpa(request, table, is_causal=is_causal)
    if table is None:
        return call_sdpa(request.q, request.k, request.v, request.scale, is_causal=is_causal)
    blind = (table == -torch.inf).all(-1, keepdim=True)  # other devices' kernels need not give 0 for these
    return call_sdpa(request.q, request.k, request.v, request.scale, table.masked_fill(blind, 0)).masked_fill(blind, 0)


def apply_cpu_sdpa(request: Request, table: Tensor | None, *, is_causal: bool) -> Tensor:
    """Call F.scaled_dot_product_attention on a CPU, with shapes and a table for which its kernel is fast and correct."""
    q, k, v = request.q, request.k, request.v
    width = v.shape[3]
    if width != q.shape[3]:  # torch's fast kernel needs equal widths; zero columns add nothing
        most = max(width, q.shape[3])
        q, k, v = (F.pad(x, (0, most - x.shape[3])) for x in (q, k, v))
    if table is None and not torch.compiler.is_exporting() and k.shape[2] < FEW_KEYS:  # a program has one length, or all
        table = q.new_zeros(1, 1, q.shape[2] if is_causal else 1, k.shape[2])
        table = table + q.new_full((q.shape[2], k.shape[2]), -torch.inf).triu(1) if is_causal else table
        is_causal = False
    context = call_sdpa(q, k, v, request.scale, table, is_causal=is_causal)
    return context if context.shape[3] == width else context[..., :width]


def call_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, table: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """Call F.scaled_dot_product_attention, with shared key heads where k has fewer heads than q, and for any scale but 0.

    torch's causal mask is -inf before the scale: a negative scale would make it +inf.
    """
    if scale < 0:
        q, scale = -q, -scale
    grouped = bool(q.shape[1] != k.shape[1])  # a tensor where torch.jit traces
    return F.scaled_dot_product_attention(q, k, v, table, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def split_queries(request: Request) -> Iterator[QueryBlock]:
    """Yield blocks of BLOCK queries; one block of all queries if mask and bias are the same for each."""
    queries, offset = request.q.shape[2], request.offset
    is_shared = not request.mask.is_query_dependent and (request.bias is None or request.bias.shape[2] == 1)
    least, greatest = (offset, offset) if isinstance(offset, int) else (int(offset.min()), int(offset.max()))
    step = queries if is_shared and request.softcap is None else BLOCK
    for start in range(0, queries, step):
        yield QueryBlock(start, min(start + step, queries), least, greatest)


def make_span_selector(x: Tensor) -> Callable[[Spans], Tensor]:
    """Return a function that selects ranges of whole blocks of the keys x (b, g, k, d).

    If a gradient is wanted, the ranges are joined from blocks that were split off once, since the gradient of every slice would
    be a tensor of zeros as long as x.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return lambda ranges: select_spans(x, ranges, 2)
    split = x.split(BLOCK, 2)
    return lambda ranges: torch.cat(
        [part for i, j in ranges for part in split[i // BLOCK : -(-j // BLOCK)]] or [x[:, :, :0]], 2
    )


def select_spans(x: Tensor, ranges: Spans, axis: int) -> Tensor:
    """Select ranges of x along an axis, concatenated."""
    if ranges == ((0, x.shape[axis]),):
        return x
    parts = [x.narrow(axis, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis) if parts else x.narrow(axis, 0, 0)


def select_bias_spans(bias: Tensor | None, ranges: Spans) -> Tensor | None:
    """Select the bias of these ranges of keys; an axis of size 1 stays."""
    return bias if bias is None or bias.shape[3] == 1 else select_spans(bias, ranges, 3)


def append_sink_keys(request: Request) -> Request:
    """Replace the sinks of a request: q gains columns that hold them, and k a last key that reads only those columns.

    q' = [q, s / scale], k' = [k, 0; 0, 1], v' = [v; 0]: the last score of head h is s_h, and visible to every query.
    """
    q, k, v, mask, bias, sinks = request.q, request.k, request.v, request.mask, request.bias, request.sinks
    assert sinks is not None
    most = torch.finfo(q.dtype).max / 4  # a sink of -inf would make NaN of 0 · -inf
    exact = sinks.to(score_dtype(q.dtype)) / request.scale
    columns = split_numbers(exact.clamp(-most, most), q.dtype)  # (h, n)
    count = columns.shape[1]
    q = torch.cat((q, columns.unsqueeze(1).expand(*q.shape[:3], count)), 3)
    last = F.pad(k.new_ones(1, count), (k.shape[3], 0)).expand(*k.shape[:2], 1, -1)
    k = torch.cat((F.pad(k, (0, count)), last), 2)
    if isinstance(mask, Given):
        mask = Given.from_shared_table(F.pad(mask.given.expand(*mask.given.shape[:3], v.shape[2]), (0, 1), value=True))
    if bias is not None:
        bias = F.pad(bias.expand(*bias.shape[:3], v.shape[2]), (0, 1))
    return request._replace(q=q, k=k, v=F.pad(v, (0, 0, 0, 1)), mask=mask, bias=bias, sinks=None)


def can_hold_sinks(scale: float, dtype: torch.dtype) -> bool:
    """Return whether a column of this dtype can hold s / scale for any sink s up to LARGEST_SINK."""
    return abs(scale) * torch.finfo(dtype).max > LARGEST_SINK


def split_numbers(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Split numbers (n,) into columns (n, parts) of a dtype that sum to them; the gradient goes to the first column."""
    parts, rest = [exact.to(dtype)], exact.detach()
    for _ in range(FLOAT32_PARTS.get(dtype, 1) - 1):
        rest = rest - parts[-1].detach()
        parts.append(rest.to(dtype))
    return torch.stack(parts, -1)
