"""Compilation of the loops that generation calls, in a thread, before a text needs them: it takes up to half a minute once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from regard.compiled import threads
from regard.matmul import QuantizedLinear
from regard.matmul.float32_linear import LEAST, load_compiled_products
from regard.matmul.quantized_linear import MOST_EXACT
from regard.models.compiled_decoder import CompiledDecoder
from regard.models.gpt2 import GPT2


def start_compilation(model: nn.Module) -> "Future[None]":
    """Compile the loops that generation with a model calls, or read them from the cache, in a thread if there are any."""
    loops = list_loops(model)
    if not loops:
        done = Future[None]()
        done.set_result(None)
        return done
    pool = ThreadPoolExecutor(1, "regard-compiling")
    future = pool.submit(compile_loops, loops)
    pool.shutdown(wait=False)
    return future


def compile_loops(loops: Sequence[Callable[[], Any]]) -> None:
    """Compile what `list_loops` lists, or read it from the cache."""
    for get_loop in loops:
        _ = get_loop().address


def list_loops(model: nn.Module) -> list[Callable[[], Any]]:
    """List functions that return the loops, each a `LazyCallback`; they import numba."""
    tensors = model.state_dict().values()
    if not threads.can_run_loops() or any(x.device.type != "cpu" for x in tensors):
        return []
    is_own = isinstance(model, GPT2) or any(isinstance(part, QuantizedLinear) for part in model.modules())
    has_products = is_own and any(has_compiled_product(x) for x in tensors)
    reading = getattr(model, "reading", lambda: None)()
    has_decoder = isinstance(reading, CompiledDecoder) and reading.can_compile()
    return [get_product_loop] * has_products + [get_decoder_loop] * has_decoder


def has_compiled_product(x: Tensor) -> bool:
    """Return whether products with the numbers of a matrix are compiled; a byte of int4 holds two."""
    if x.dtype in (torch.int8, torch.uint8):
        return x.numel() * (2 if x.dtype == torch.uint8 else 1) > MOST_EXACT
    return x.numel() >= LEAST and x.dtype != torch.float64


def get_product_loop() -> Any:
    """Return the loop of the products of a matrix with a few vectors."""
    return load_compiled_products().multiply_shared


def get_decoder_loop() -> Any:
    """Return the loop of a whole model."""
    from regard.models import numba_decoder

    return numba_decoder.run_worker
