"""Batches of small matrices, such as the heads of a short text: all planes go through one pass, instead of one after the other.

So do the same few rows of several planes.

Their row statistics are those of passes.py.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard.compiled import threads
from regard.map import compiled_passes, passes
from regard.map.plane import Denominators, Plane, WeightRows, count_block_numbers, exponentiate_rows
from regard.map.weight_sums import SumRequest, WeightSums
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.request import Request, disable_autocast
from regard.mechanism.scores import score_dtype

LONGEST = 256  # queries and keys, of which a picture of an overview shows each by itself
MOST_SCORES = 2**18  # of the rows of a plane, up to which its own product is not worth it


def is_worth_batch(request: Request, count: int) -> bool:
    """Return whether the matrices of a request are small, and `count` of them at least one."""
    q, k = request.q.shape[2], request.k.shape[2]
    return count > 0 and 0 < q <= LONGEST and 0 < k <= LONGEST and request.weight is None and request.q.shape[3] > 0


def is_gpu_batch(request: Request, count: int) -> bool:
    """Return whether `count` planes are on a GPU and a block holds several, so that fewer operations are launched."""
    q, k = request.q.shape[2], request.k.shape[2]
    fits = count > 1 and 0 < 2 * q * k <= count_block_numbers(request.q.device)
    return fits and request.q.is_cuda and request.weight is None and request.q.shape[3] > 0


def are_rows_worth_batch(request: Request, count: int, rows: int) -> bool:
    """Return whether this number of rows, the same of each of `count` planes, are better computed together."""
    return count > 1 and 0 < rows * request.k.shape[2] <= MOST_SCORES and request.weight is None and request.q.shape[3] > 0


def iterate_batches(request: Request, pairs: Tensor) -> Iterator[WeightRows]:
    """Yield the matrices of some pairs (n, 2) of batch row and head, in order, as many at a time as a block holds."""
    queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (request.q, request.k))
    for b, h, masked in iterate_scores(request, pairs):
        below, exponentials = exponentiate_rows(masked, select_sinks(request, h))
        positions = queries + select_offsets(request, b).unsqueeze(-1)
        yield WeightRows(((0, len(keys)),), keys, positions, masked, below.divide(exponentials), below)


def iterate_scores(request: Request, pairs: Tensor, queries: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield batch rows (n,), heads (n,) and masked scores (n, q, k) of some pairs, as many at a time as a block holds.

    The scores are of all queries, or of some by index (q,).
    """
    exact = score_dtype(request.q.dtype)
    if queries is None:
        queries = torch.arange(request.q.shape[2], device=request.q.device)
    else:
        request = select_queries(request, queries)
    rows, heads = pairs.T
    size = max(1, count_block_numbers(request.q.device) // (request.q.shape[2] * request.k.shape[2]))
    share = request.q.shape[1] // request.k.shape[1]
    for b, h in zip(rows.split(size), heads.split(size), strict=True):
        row, group, each = find_repeats(b, h // share)  # heads that share keys go through one product
        q, k = request.q[b, h].to(exact), request.k[row, group].to(exact)
        with disable_autocast(q.device):
            masked = torch.bmm(q.unflatten(0, (-1, each)).flatten(1, 2), k.mT).view(*q.shape[:2], -1).mul_(request.scale)
        if request.softcap is not None:
            masked.div_(request.softcap).tanh_().mul_(request.softcap)
        if request.bias is not None:
            masked += select_pairs(request.bias, b, h).to(masked.dtype)
        if request.mask != EVERYTHING:
            masked.masked_fill_(~can_see_keys(request, b, h, queries), -torch.inf)
        yield b, h, masked


def find_repeats(b: Tensor, group: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return batch rows and groups of heads without the repeats that follow each other, and how many there are of each.

    The same tensors and 1 if their numbers differ.
    """
    pairs, counts = torch.stack([b, group]).unique_consecutive(dim=1, return_counts=True)
    each = int(counts[0])
    return (*pairs, each) if bool((counts == each).all()) else (b, group, 1)


def select_queries(request: Request, queries: Tensor) -> Request:
    """Return a request with the q and the bias of some queries, by index (n,); its mask is still that of all queries."""
    bias = request.bias
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, queries]
    return request._replace(q=request.q[:, :, queries], bias=bias)


def select_sinks(request: Request, heads: Tensor) -> Tensor | None:
    """Return the scores of the sinks of heads (n,), (n, 1, 1), in the dtype of the scores; None without sinks."""
    return None if request.sinks is None else request.sinks[heads].to(score_dtype(request.q.dtype)).view(-1, 1, 1)


def select_offsets(request: Request, rows: Tensor) -> Tensor:
    """Return the offsets of batch rows (n,), (n,)."""
    return torch.as_tensor(request.offset, device=rows.device).expand(request.q.shape[0])[rows]


def select_pairs(table: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Return the parts (n, q or 1, k or 1) of a table (b or 1, h or 1, q or 1, k or 1) that belong to pairs."""
    if table.shape[:2] == (1, 1):
        return table[0]
    return table[b if len(table) > 1 else torch.zeros_like(b), h if table.shape[1] > 1 else torch.zeros_like(h)]


def can_see_keys(request: Request, b: Tensor, h: Tensor, queries: Tensor) -> Tensor:
    """Return which keys the queries (q,) of pairs (n,) may see, (n or 1, q, k); on a GPU without the table of other pairs."""
    keys = torch.arange(request.k.shape[2], device=queries.device)
    if not queries.is_cuda:
        return select_pairs(request.mask.block(queries, keys, request.offset), b, h)
    return request.mask.can_see(b.view(-1, 1, 1), h.view(-1, 1, 1), queries.unsqueeze(-1), keys, request.offset)


def compute_selected_rows(request: Request, pairs: Tensor, queries: Tensor) -> Tensor:
    """Compute the weights of some queries, by index (n,), of each pair, (pairs, n, k)."""
    found = [weigh_scores(masked, select_sinks(request, h)) for _, h, masked in iterate_scores(request, pairs, queries)]
    return found[0] if len(found) == 1 else torch.cat(found)


def weigh_scores(masked: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax of scores (n, q, k) beside sinks (n, 1, 1); 0 for a row that sees nothing."""
    if sinks is not None:
        below, exponentials = exponentiate_rows(masked, sinks)
        return below.divide(exponentials)
    weights = masked.softmax(-1)
    if weights[..., 0].isnan().any():  # a row that sees nothing, or that holds a NaN
        weights.masked_fill_(masked.amax(-1, keepdim=True) == -torch.inf, 0)
    return weights


def compute_rows(request: Request, pairs: Tensor, *functions: Callable[[WeightRows], Tensor]) -> list[Tensor]:
    """Return what functions of a batch return, (n, ...) each, of all pairs."""
    found = [[function(batch) for function in functions] for batch in iterate_batches(request, pairs)]
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True)]


def get_weights(batch: WeightRows) -> Tensor:
    """Return the weights."""
    return batch.weights


def sum_columns(batch: WeightRows) -> Tensor:
    """Return the sum of each column, accumulated in float64."""
    return batch.weights.sum(1, dtype=torch.float64).to(batch.weights.dtype)


def gather_statistics(
    request: Request, pairs: Tensor, names: Sequence[str], has_picture: bool = False
) -> tuple[dict[str, Tensor], Denominators]:
    """Compute row statistics by name, the sum of each column, the weights if they are the picture, and denominators."""
    found = gather_compiled_statistics(request, pairs, has_picture)
    if found is None:
        functions = {name: passes.ROWS[name] for name in names} | {"received": sum_columns}
        functions |= {"weights": get_weights} if has_picture else {}
        functions |= {"shift": lambda batch: batch.denominators.shift, "total": lambda batch: batch.denominators.total}
        found = dict(zip(functions, compute_rows(request, pairs, *functions.values()), strict=True))
    return found, Denominators(found.pop("shift"), found.pop("total"))


def gather_sums(request: Request, pairs: Tensor, wanted: SumRequest) -> tuple[dict[str, Tensor], WeightSums] | None:
    """Compute row statistics (b, h, q) by name, column sums, "shift" and "total", and sums; None if no compiled pass applies.

    The pairs are those of some batch rows with some heads, in order.
    """
    if not can_run_compiled(request):
        return None
    b, q, k = len(wanted.first), request.q.shape[2], request.k.shape[2]
    sums = WeightSums.allocate(wanted, b, len(pairs) // b, q, k)
    found = compiled_passes.summarize_planes(request, pairs, sums=sums, wanted=wanted)
    return None if found is None else (found, sums)


def compute_weights(request: Request, pairs: Tensor) -> Tensor:
    """Compute the weights (n, q, k) of some pairs."""
    found = gather_compiled_statistics(request, pairs, has_picture=True)
    return compute_rows(request, pairs, get_weights)[0] if found is None else found["weights"]


def gather_compiled_statistics(request: Request, pairs: Tensor, has_picture: bool) -> dict[str, Tensor] | None:
    """Compute what `gather_statistics` does by compiled loops; None where they do not apply, or if there is a NaN."""
    return compiled_passes.summarize_planes(request, pairs, has_picture) if can_run_compiled(request) else None


def can_run_compiled(request: Request) -> bool:
    """Return whether the compiled loops apply to the matrices of a request."""
    return compiled_passes.can_run_compiled(Plane(request, 0, 0)) and threads.can_run_loops()
