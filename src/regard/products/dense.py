"""x Wᵀ + b where W is large: by the faster of the products there are for so many vectors, which none of them is for all.

Of few vectors the memory is what takes the time: each thread reads a part of W. Of more it is the sums, for which torch carries
two libraries; `compiled/choices.py` says which is the faster one on this processor.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compiled import choices, threads
from regard.compiled.watched import plain, unwatched

MOST = 4  # vectors that the compiled product is for
LEAST = 2**16  # numbers of a matrix; of fewer, torch's own product is as fast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias; x (..., n), weight (rows, n), bias (rows,); the output (..., rows).

    float32 on a CPU, without gradients, goes through a product compiled by numba where it is installed and the vectors are
    few, else through oneDNN where that is faster: the sums are added in another order than by F.linear. All else is F.linear.
    """
    if not suits(x, weight, bias):
        return F.linear(x, weight, bias)
    if x.numel() <= MOST * weight.shape[1] and compiled() is not None:
        output = torch.empty(*x.shape[:-1], len(weight))
        multiply("FLOATS", weight, None, x, bias, output)
        return output
    if choices.product_library() != "oneDNN":
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether x weightᵀ + bias is one of these products."""
    if weight.numel() < LEAST or not x.numel() or weight.dim() != 2 or not weight.is_contiguous():
        return False
    fits = x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    return fits and (free(x, weight) if bias is None else free(x, weight, bias))


def free(*tensors: Tensor) -> bool:
    """Whether these are float32 numbers in memory, of which nobody asks for gradients or for torch's own operations."""
    if not unwatched() or torch.is_autocast_enabled("cpu"):  # asked first, since compilers follow what is asked
        return False
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not learns and all(plain(x) and x.dtype == torch.float32 for x in tensors)


@cache
def compiled() -> Any:
    """The module of compiled products; None where numba is not installed, or torch's threads cannot be had."""
    if not threads.usable():
        return None
    from regard.products import compiled

    return compiled


def multiply(kind: str, matrix: Tensor, scales: Tensor | None, x: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """output = x matrixᵀ, times the scale of each row, plus bias: all contiguous but x."""
    x = x.contiguous()
    places = (0 if one is None else one.data_ptr() for one in (matrix, scales, x, bias, output))
    count, (rows, columns) = torch.get_num_threads(), matrix.shape
    run = max(threads.RUN, rows // (threads.RUNS * count))
    threads.run(getattr(compiled(), kind), [0, *places, rows, columns, x.numel() // columns, run], count)
