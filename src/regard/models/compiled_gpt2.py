"""GPT-2 on a few tokens, in one call: a hundred small operations take long compared with reading the weights.

The model remains the definition. The compiled form computes the same, and runs only if no hook or mode observes the model and
no part of it was replaced.
"""

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from regard.compiled import threads
from regard.compiled.dispatch_guard import can_bypass_dispatch, is_plain_tensor
from regard.compiled.matrix_formats import DTYPES, FIELDS, GROUP, describe_matrix, pad_columns
from regard.generate.kv_cache import Cache
from regard.generate.quantization import QuantizedEmbedding
from regard.layers.multi_head import MultiHeadAttention
from regard.matmul import Linear, QuantizedLinear
from regard.matmul.float32_linear import LEAST

MOST = {torch.float32: 4, torch.bfloat16: 16, torch.float16: 16, torch.int8: 16, torch.uint8: 16}  # most vectors, by dtype
NORMS = ("norm_attention", "norm_feed")  # norms of a block
MATRICES = ("attention.W_query", "attention.W_key", "attention.W_value", "attention.out_proj", "up", "down")
PARTS = {MultiHeadAttention, Linear, QuantizedLinear, QuantizedEmbedding, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}


class Part(NamedTuple):
    """A tensor of a model or its cache, and the shape and dtypes that compiled code reads; None stands for no tensor."""

    tensor: Tensor | None
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]

    def fits(self) -> bool:
        """Return whether the tensor is as compiled code reads it."""
        x = self.tensor
        if x is None:
            return None in self.dtypes
        return x.dtype in self.dtypes and x.shape == self.shape and x.is_contiguous() and is_plain_tensor(x)


class CompiledGPT2:
    """A GPT-2 that reads a few tokens at a time: model(tokens, cache), in one compiled call where possible."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooks = -1  # RemovableHandle.next_id when the model was last checked
        self.groups: list[list[Part]] = []  # the model's tensors, which these references keep in memory
        self.cache: Cache | None = None  # the cache last checked
        self.addresses: Any = None
        self.most = 0  # most vectors at a time; 0 if something does not fit

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
        is_intercepted = not can_bypass_dispatch() or torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu")
        if is_intercepted or torch.is_grad_enabled():
            return False
        if any(not 0 <= token < self.model.config.vocabulary for row in tokens.tolist() for token in row):
            return False  # the model raises the error
        if self.hooks != RemovableHandle.next_id:  # a part may have a new hook
            self.hooks, self.cache = RemovableHandle.next_id, None
            self.groups = list_parts(self.model) if has_standard_parts(self.model) else []
        if self.cache is not cache:
            self.cache, self.most = cache, 0
            groups = [*self.groups, *list_cache_parts(cache, self.model.config, len(tokens))]
            if self.groups and all(part.fits() for group in groups for part in group):
                self.most = min(find_most_vectors(group) for group in groups)
                fields = [n for group in groups[1:] for n in list_fields(group)]
                self.addresses = (ctypes.c_int64 * len(fields))(*fields)
        return tokens.numel() <= self.most

    def run(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Compute the logits in one compiled call."""
        from regard.models import numba_gpt2  # imports numba, which is installed if this is called

        config, several, (b, t) = self.model.config, torch.get_num_threads(), tokens.shape
        starts = cache.advance(t)
        firsts = starts.tolist() if isinstance(starts, Tensor) else [starts] * b
        positions = [first + step for first in firsts for step in range(t)]
        wanted = list_outputs(cache.wanted, b, t)
        padded = pad_columns(max(config.width, config.inner))
        size = b * t * (config.width + 1 + padded // 2) + cache.capacity
        own = torch.empty(several, size)
        shared = torch.empty(b * t * (5 * config.width + config.inner))
        logits = torch.empty(b, len(wanted) // b, config.vocabulary)
        counters = (ctypes.c_int64 * (2 + numba_gpt2.STAGES * config.layers))()
        places, outputs = torch.tensor(positions), torch.tensor(wanted)
        x = self.model.tokens(tokens.flatten()) + self.model.positions(places)
        threads.run_callback(
            numba_gpt2.run_worker,
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
            padded=padded,
            size=size,
            barrier=threads.find_barrier_address(),
            counters=ctypes.addressof(counters),
            positions=places,
            outputs=outputs,
            parts=ctypes.addressof(self.addresses),
            x=x,
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
    has_hooks = module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(has_hooks) or getattr(module, "max_norm", None) is not None


def has_standard_settings(block: Any, config: Any) -> bool:
    """Return whether a block's settings are those of its model, and its GELU is the one by tanh."""
    epsilons = [block.get_submodule(name).eps for name in NORMS]
    gelu = getattr(block.activation, "func", None) is F.gelu and block.activation.keywords == {"approximate": "tanh"}
    return gelu and epsilons == [config.epsilon] * 2 and block.attention.num_heads == config.heads


def list_parts(model: Any) -> list[list[Part]]:
    """List the tensors of a model: its embeddings, which torch reads, then the others in the order of the compiled form."""
    config, c, inner = model.config, model.config.width, model.config.inner
    words = model.tokens.weight if isinstance(model.tokens, nn.Embedding) else None
    head = model.tokens if model.head is None else model.head
    found = [
        [
            Part(words, (config.vocabulary, c), (torch.float32, None)),
            Part(model.positions.weight, (config.context, c), (torch.float32,)),
        ],
        list_matrix_parts(head, config.vocabulary, c),
        list_norm_parts(model.norm, c),
    ]
    sizes = dict.fromkeys(MATRICES, (c, c)) | {"up": (inner, c), "down": (c, inner)}
    for block in model.blocks:
        found += [list_norm_parts(block.get_submodule(name), c) for name in NORMS]
        found += [list_matrix_parts(block.get_submodule(name), *size) for name, size in sizes.items()]
    return found if c * c >= LEAST and len(model.blocks) == config.layers else []


def list_norm_parts(norm: Any, width: int) -> list[Part]:
    """List the weight and the bias of a norm."""
    return [Part(x, (width,), (torch.float32,)) for x in (norm.weight, norm.bias)]


def list_matrix_parts(module: Any, rows: int, columns: int) -> list[Part]:
    """List the numbers, scales, bias and largest integer of a linear layer, or of an embedding that is the head."""
    module = module.matrix if isinstance(module, QuantizedEmbedding) else module
    none, bias = Part(None, (), (None,)), Part(getattr(module, "bias", None), (rows,), (torch.float32, None))
    if not isinstance(module, QuantizedLinear):
        return [Part(module.weight, (rows, columns), (torch.float32,)), none, bias, none]
    if module.values.dtype == torch.int8:
        scales, most = Part(module.scales, (rows,), (torch.float32,)), Part(module.most, (), (torch.int64,))
        return [Part(module.values, (rows, columns), (torch.int8,)), scales, bias, most]
    if module.values.dtype == torch.uint8:
        padded = pad_columns(columns) if module.columns == columns else 0
        scales = Part(module.scales, (rows, padded // GROUP), (torch.bfloat16,))
        return [Part(module.values, (rows, padded // 2), (torch.uint8,)), scales, bias, none]
    return [Part(module.values, (rows, columns), tuple(DTYPES)), Part(module.scales, (), (None,)), bias, none]


def list_cache_parts(cache: Cache, config: Any, b: int) -> list[list[Part]]:
    """List the keys and values of each layer."""
    shape = b, config.heads, cache.capacity, config.width // config.heads
    return [[Part(x, shape, (torch.float32,)) for x in layer] for layer in cache.keys_and_values]


def is_matrix(group: list[Part]) -> bool:
    """Return whether these are the parts of a matrix, and not of a norm, the embeddings or a cache."""
    return len(group) == FIELDS - 1


def find_most_vectors(group: list[Part]) -> int:
    """Return for how many vectors the compiled form reads a matrix faster than the model does."""
    numbers = group[0].tensor
    return MOST[numbers.dtype] if is_matrix(group) and numbers is not None else max(MOST.values())


def list_fields(group: list[Part]) -> list[int]:
    """Return what compiled code reads of a matrix, or the addresses of other tensors."""
    tensors = [part.tensor for part in group]
    return describe_matrix(tensors) if is_matrix(group) else [0 if x is None else x.data_ptr() for x in tensors]
