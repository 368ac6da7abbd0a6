"""A sink as one more key with a value of zeros, for kernels that have no sinks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.masks import Given
from regard.mechanism.request import Request
from regard.mechanism.scores import score_dtype

LARGEST = 400.0  # a score this far from the others has all of the weight, or none
PARTS = {torch.bfloat16: 3, torch.float16: 3}  # count of numbers of this dtype that sum to a float32


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
    """Return whether a column of this dtype can hold s / scale for any sink s up to LARGEST."""
    return abs(scale) * torch.finfo(dtype).max > LARGEST


def split_numbers(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Split numbers (n,) into columns (n, parts) of a dtype that sum to them; the gradient goes to the first column."""
    parts, rest = [exact.to(dtype)], exact.detach()
    for _ in range(PARTS.get(dtype, 1) - 1):
        rest = rest - parts[-1].detach()
        parts.append(rest.to(dtype))
    return torch.stack(parts, -1)
