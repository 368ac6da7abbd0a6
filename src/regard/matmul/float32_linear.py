"""x Wᵀ + b where W is large: by the product that is fastest for the number of vectors.

For few vectors memory bandwidth is the limit: each thread reads a part of W. For more it is arithmetic, for which torch carries
two libraries; `compiled/kernel_choice.py` chooses the faster one on this processor.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.compiled import kernel_choice, threads
from regard.compiled.dispatch_guard import can_bypass_dispatch, is_plain_tensor
from regard.compiled.matrix_formats import INT8, MATRIX_FIELDS, count_shorts, describe_matrix

LEAST = 2**16  # numbers of a matrix; for fewer, torch's own product is as fast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weightᵀ + bias; x (..., n), weight (rows, n), bias (rows,); the output (..., rows).

    float32 on a CPU, without gradients, uses a product compiled by numba if it is installed and there are few vectors,
    else oneDNN if that is faster: the sums are added in another order than by F.linear. All else uses F.linear.
    """
    if not can_use_fast_product(x, weight, bias):
        return F.linear(x, weight, bias)
    if x.numel() <= kernel_choice.count_most_compiled_vectors() * weight.shape[1] and load_compiled_products() is not None:
        output = x.new_empty(*x.shape[:-1], len(weight))
        launch_product([weight, None, bias, None], x, output)
        return output
    if x.numel() > kernel_choice.find_onednn_limit() * weight.shape[1]:
        return F.linear(x, weight, bias)
    return multiply_by_onednn(x, weight, bias)


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weightᵀ + bias by oneDNN, whose weight must be contiguous."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


class Linear(nn.Linear):
    """x Wᵀ + b, as nn.Linear, by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map x (..., d_in) to (..., d_out)."""
        return linear(input, self.weight, self.bias)


def can_use_fast_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether x weightᵀ + bias may use the compiled product or oneDNN."""
    if weight.numel() < LEAST or not x.numel() or weight.dim() != 2 or not weight.is_contiguous():
        return False
    fits = x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    return fits and (can_bypass_torch(x, weight) if bias is None else can_bypass_torch(x, weight, bias))


def can_bypass_torch(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Return whether these are plain CPU tensors of these dtypes that need no gradients, with no dispatch to intercept."""
    if not can_bypass_dispatch() or torch.is_autocast_enabled("cpu"):  # first, since compilers trace the rest
        return False
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not learns and all(is_plain_tensor(x) and x.dtype in dtypes for x in tensors)


@cache
def load_compiled_products() -> Any:
    """Return the module of compiled products; None if numba is not installed or torch's threads are not available."""
    if not threads.can_run_loops():
        return None
    from regard.matmul import numba_matmul

    return numba_matmul


def launch_product(matrix: list[Tensor | None], x: Tensor, output: Tensor) -> None:
    """Set output (..., rows) to x matrixᵀ + bias: its numbers, scales, bias and scales of groups, all contiguous."""
    x, (rows, columns) = x.contiguous(), (output.shape[-1], x.shape[-1])
    several = torch.get_num_threads() if rows * x.numel() >= LEAST else 1  # of little work, waiting for threads takes longer
    count, shorts = x.numel() // columns, count_shorts(columns)
    fields = dict(zip(MATRIX_FIELDS, describe_matrix(matrix), strict=True))
    sizes = {"rows": rows, "columns": columns, "count": count, "shorts": shorts}
    buffers: dict[str, Any] = {}
    numbers = matrix[0]
    assert numbers is not None
    if numbers.dtype != torch.float32:  # for vectors that are rounded
        integers, factors = x.new_empty(count, shorts, dtype=torch.int16), x.new_empty(count)
        buffers = {"integers": integers, "factors": factors}
        buffers["barrier"] = threads.find_barrier_address()
    block = max(threads.LEAST_ROWS, rows // (threads.BLOCKS_PER_THREAD * several))
    products = load_compiled_products()
    by_panels = fields["format"] >= INT8 and 0 < kernel_choice.count_least_vectors_for_panels() <= count
    work = products.multiply_shared_panels if by_panels else products.multiply_shared
    threads.run_callback(work, several, block=block, x=x, output=output, **fields, **sizes, **buffers)
