"""A linear layer of GPT-2's, 768 to 3072, on so many vectors: every way there is to compute it, weights read from memory.

Many matrices are taken in turn, so that none of them waits in the caches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import time_contenders
from regard.matmul import QuantizedLinear, linear
from regard.matmul.float32_linear import launch_product, load_compiled_products
from regard.matmul.quantized_linear import WEIGHTS

ROWS, WIDTH, MATRICES = 3072, 768, 32
COUNTS = (1, 2, 4, 8, 16, 32, 64, 1000)
TITLE = "x Wᵀ + b, W 3072 x 768 in float32, microseconds"
FLOATS = ["F.linear", "regard", "compiled", "oneDNN", "oneDNN, packed"]
COLUMNS = ["vectors", *FLOATS, *(f"regard, {to}" for to in WEIGHTS), "regard reads GB/s"]


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each number of vectors; the first five are equal, those in fewer bits are what they are."""
    table = Table(TITLE, COLUMNS)
    torch.manual_seed(0)
    weights, bias = [torch.randn(ROWS, WIDTH) for _ in range(MATRICES)], torch.randn(ROWS)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    small = {to: [QuantizedLinear.from_weight(weight, bias, to) for weight in weights] for to in WEIGHTS}
    with torch.inference_mode():
        for count in COUNTS:
            x = torch.randn(count, WIDTH)
            ways = {
                "F.linear": in_turn(weights, partial(multiply_separately, F.linear, x, bias)),
                "regard": in_turn(weights, partial(multiply_separately, linear, x, bias)),
                "oneDNN": in_turn(weights, partial(multiply_with_onednn, x, bias)),
                "oneDNN, packed": in_turn(packed, partial(multiply_with_onednn, x, bias)),
            }
            if load_compiled_products() is not None and count <= 16:
                ways["compiled"] = in_turn(weights, partial(multiply_with_numba, x, bias))
            beside = {f"regard, {to}": in_turn(matrices, lambda one, x=x: one(x)) for to, matrices in small.items()}
            found = time_contenders(ways, 1e-3, beside=beside)
            micros = {name: 1e3 * milliseconds for name, milliseconds in found.medians.items()}
            speed = 4 * ROWS * WIDTH / micros["regard"] / 1e3
            table.add(count, *(micros.get(name) for name in COLUMNS[1:-1]), speed)
    return table


def in_turn(matrices: Sequence[object], way: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """A way on the next of the matrices each time; all ways begin with the first."""
    turns = cycle(matrices)
    return lambda: way(next(turns))


def multiply_separately(product: Callable[..., Tensor], x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight, bias)


def multiply_with_onednn(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def multiply_with_numba(x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    output = torch.empty(len(x), ROWS)
    launch_product([weight, None, bias, None], x, output)
    return output
