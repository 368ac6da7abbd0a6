"""GPT-2 on a few tokens, in one call: a hundred small operations take long compared with reading the weights.

The model remains the definition. The compiled form computes the same, and runs only if no hook or mode observes the model and
no part of it was replaced.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from regard.compiled import threads
from regard.compiled.dispatch_guard import can_bypass_dispatch, is_plain_tensor
from regard.generate.kv_cache import Cache
from regard.generate.quantization import QuantizedEmbedding
from regard.layers.multi_head import MultiHeadAttention
from regard.matmul import Linear, QuantizedLinear
from regard.matmul.float32_linear import LEAST

MOST = {torch.float32: 4, torch.int8: 16}  # most vectors, by dtype of the matrices; more are faster in the plain model
NORMS = ("norm_attention", "norm_feed")  # norms of a block
MATRICES = ("attention.W_query", "attention.W_key", "attention.W_value", "attention.out_proj", "up", "down")
PARTS = {MultiHeadAttention, Linear, QuantizedLinear, QuantizedEmbedding, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}
Form = tuple[tuple[int, ...], tuple[torch.dtype | None, ...]]  # shape and allowed dtypes of a tensor, None if optional


class CompiledGPT2:
    """A GPT-2 that reads a few tokens at a time: model(tokens, cache), in one compiled call where possible."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooks = -1  # RemovableHandle.next_id when the model was last checked
        self.tensors: list[Tensor | None] = []  # the model's, which these references keep in memory
        self.cache: Cache | None = None  # the cache last checked
        self.addresses: Any = None
        self.dtype: torch.dtype | None = None  # dtype of the matrices; None if something does not fit

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Compute the logits of the next token after each of (b, t), or after those that the cache selects."""
        if self.can_run(tokens, cache):
            return self.run(tokens, cache)
        found: Tensor = self.model(tokens, cache)
        return found

    def can_run(self, tokens: Tensor, cache: Cache) -> bool:
        """Return whether the compiled call is observably identical to the model, except in time."""
        if tokens.dim() != 2 or not 0 < tokens.numel() <= max(MOST.values()) or not cache.longest or self.model.training:
            return False
        watched = not can_bypass_dispatch() or torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu")
        if watched or torch.is_grad_enabled():
            return False
        if any(not 0 <= token < self.model.config.vocabulary for row in tokens.tolist() for token in row):
            return False  # the model raises the error
        if self.hooks != RemovableHandle.next_id:  # a part may have a new hook
            self.hooks, self.cache = RemovableHandle.next_id, None
            self.tensors = list_tensors(self.model) if has_standard_parts(self.model) else []
        if self.cache is not cache:
            both = [*self.tensors, *(x for layer in cache.keys_and_values for x in layer)] if self.tensors else []
            self.cache, self.dtype = (
                cache,
                find_matrix_dtype(both, self.model.config, len(tokens), cache.capacity) if both else None,
            )
            self.addresses = (ctypes.c_int64 * len(both))(*(0 if x is None else x.data_ptr() for x in both))
        return self.dtype is not None and tokens.numel() <= MOST[self.dtype]

    def run(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Compute the logits in one compiled call."""
        from regard.compiled.int8_gemm import VECTORS  # imports numba, which is installed if this is called
        from regard.models import numba_gpt2

        config, several, (b, t) = self.model.config, torch.get_num_threads(), tokens.shape
        starts = cache.advance(t)
        firsts = starts.tolist() if isinstance(starts, Tensor) else [starts] * b
        positions = [first + step for first in firsts for step in range(t)]
        wanted = list_outputs(cache.wanted, b, t)
        spare = b * t + VECTORS  # padding to full groups of VECTORS
        size = b * t * config.width + cache.capacity + spare + spare * max(config.width, config.inner)
        own = torch.empty(several, size)
        shared = torch.empty(b * t * (6 * config.width + config.inner))
        logits = torch.empty(b, len(wanted) // b, config.vocabulary)
        counters = (ctypes.c_int64 * (2 + numba_gpt2.STAGES * config.layers))()
        ids, places, outputs = ((ctypes.c_int64 * len(some))(*some) for some in (tokens.flatten().tolist(), positions, wanted))
        threads.run_callback(
            numba_gpt2.FLOATS if self.dtype == torch.float32 else numba_gpt2.BYTES,
            several,
            threads=several,
            layers=config.layers,
            count=b * t,
            new=t,
            output_count=len(wanted),
            heads=config.heads,
            width=config.width,
            inner=config.inner,
            capacity=cache.capacity,
            vocabulary=config.vocabulary,
            size=size,
            barrier=threads.find_barrier_address(),
            counters=ctypes.addressof(counters),
            tokens=ctypes.addressof(ids),
            positions=ctypes.addressof(places),
            outputs=ctypes.addressof(outputs),
            parts=ctypes.addressof(self.addresses),
            own=own,
            shared=shared,
            logits=logits,
            epsilon=config.epsilon,
        )
        return logits


def list_outputs(wanted: int | Tensor | None, b: int, t: int) -> list[int]:
    """List which of b rows of t vectors Cache.select_wanted selects, as indices into b t vectors."""
    if isinstance(wanted, Tensor):
        return [row * t + place for row, place in enumerate(wanted.tolist())]
    return [row * t + place for row in range(b) for place in range(0 if wanted is None else t - wanted, t)]


def has_standard_parts(model: Any) -> bool:
    """Return whether a GPT-2 has exactly the parts that the compiled form implements, whatever their weights."""
    if not threads.can_run_loops() or not threads.find_barrier_address():
        return False
    known = PARTS | {type(model), type(model.blocks[0])}
    as_made = all(type(part) in known and not is_modified(part) for part in model.modules()) and not _has_any_global_hook()
    return (
        bool(as_made)
        and model.norm.eps == model.config.epsilon
        and all(has_standard_settings(one, model.config) for one in model.blocks)
    )


def is_modified(module: nn.Module) -> bool:
    """Return whether a module is in training mode, has hooks or a replaced forward, or is an embedding with max_norm."""
    hooked = module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(hooked) or getattr(module, "max_norm", None) is not None


def has_standard_settings(block: Any, config: Any) -> bool:
    """Return whether a block's settings are those of its model, and its GELU is the one by tanh."""
    epsilons = [block.get_submodule(name).eps for name in NORMS]
    gelu = getattr(block.activation, "func", None) is F.gelu and block.activation.keywords == {"approximate": "tanh"}
    return gelu and epsilons == [config.epsilon] * 2 and block.attention.num_heads == config.heads


def find_matrix_dtype(both: list[Tensor | None], config: Any, b: int, room: int) -> torch.dtype | None:
    """Return the dtype of all matrices if each tensor of a model and its cache is as the compiled form reads it; else None."""
    c, inner = config.width, config.inner
    holds = torch.float32 if both[1] is None else torch.int8  # both[1]: scales of the token embedding
    vector: list[Form] = [((c,), (torch.float32,))]

    def matrix_forms(count: int, columns: int) -> list[Form]:
        scales, most = (None, None) if holds == torch.float32 else (torch.float32, torch.int64)
        return [((count, columns), (holds,)), ((count,), (scales,)), ((count,), (torch.float32, None)), ((), (most,))]

    ends: list[Form] = [*2 * matrix_forms(config.vocabulary, c), *2 * vector, ((config.context, c), (torch.float32,))]
    layer = 4 * vector + 4 * matrix_forms(c, c) + matrix_forms(inner, c) + matrix_forms(c, inner)
    kept: list[Form] = [((b, config.heads, room, c // config.heads), (torch.float32,))] * 2
    known = ends + config.layers * layer + config.layers * kept
    fits = c * c >= LEAST and len(known) == len(both) and all(map(has_form, both, known))
    return holds if fits else None


def has_form(x: Tensor | None, form: Form) -> bool:
    """Return whether a tensor has the shape, dtype and memory layout that the compiled form reads."""
    shape, kinds = form
    return None in kinds if x is None else x.dtype in kinds and x.shape == shape and x.is_contiguous() and is_plain_tensor(x)


def list_tensors(model: Any) -> list[Tensor | None]:
    """List the tensors of a model, in the order in which the compiled form takes them."""
    head = model.tokens if model.head is None else model.head
    found = [
        *list_matrix_tensors(model.tokens),
        *list_matrix_tensors(head),
        model.norm.weight,
        model.norm.bias,
        model.positions.weight,
    ]
    for block in model.blocks:
        found += [getattr(block.get_submodule(name), kind) for name in NORMS for kind in ("weight", "bias")]
        found += [x for name in MATRICES for x in list_matrix_tensors(block.get_submodule(name))]
    return [None if x is None else x.detach() for x in found]


def list_matrix_tensors(of: Any) -> list[Tensor | None]:
    """List the numbers of a linear layer or an embedding, their scales, its bias, and how large its vectors may be."""
    of = of.matrix if isinstance(of, QuantizedEmbedding) else of
    small = isinstance(of, QuantizedLinear)
    return [of.values, of.scales, of.bias, of.most] if small else [of.weight, None, getattr(of, "bias", None), None]
