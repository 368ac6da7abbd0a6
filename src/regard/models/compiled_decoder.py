"""A decoder on a few tokens, in one call: a hundred small operations take long compared with reading the weights.

The model remains the definition. The compiled form computes the same, and runs only if no hook or mode observes the model and
no part of it was replaced. Each family of models has a function that describes one: `describe_gpt2`, `describe_decoder`.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from regard.compiled import threads
from regard.compiled.dispatch_guard import can_bypass_dispatch, is_plain_tensor
from regard.compiled.kernel_choice import count_vectors_in_one_call
from regard.compiled.matrix_formats import DTYPES, FIELDS, GROUP, count_group_scales, count_shorts, describe_matrix, pad_columns
from regard.generate.kv_cache import Cache
from regard.generate.quantization import QuantizedEmbedding
from regard.matmul import QuantizedLinear

MOST = {dtype: count_vectors_in_one_call(dtype) for dtype in DTYPES}  # most vectors, by the dtype of the numbers


class ExpectedTensor(NamedTuple):
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


NO_TENSOR = ExpectedTensor(None, (), (None,))
NO_MATRIX = [NO_TENSOR] * (FIELDS - 1)


@dataclass(frozen=True, eq=False)
class DecoderDescription:
    """What compiled code computes for a model: its sizes, and its tensors in the order in which compiled code reads them.

    parts are the head, the last norm, and of each layer the two norms and the matrices of q, k, v, output, up, down and gate.
    `embed` returns the vectors (n, width) of tokens (n,) at positions (n,); it reads the tensors `embedding`. `make_angles`, if
    positions are rotated, returns the cosines and sines (n, 2, head_width) of the first n positions.
    """

    heads: int
    key_heads: int
    head_width: int
    width: int
    inner: int
    vocabulary: int
    layers: int
    epsilon: float
    scale: float
    embed: Callable[[Tensor, Tensor], Tensor]
    embedding: list[ExpectedTensor]
    parts: list[list[ExpectedTensor]]
    has_rms_norms: bool = False
    make_angles: Callable[[int], Tensor] | None = None

    def fits(self) -> bool:
        """Return whether all tensors are as compiled code reads them."""
        return all(part.fits() for group in [self.embedding, *self.parts] for part in group)


class CompiledDecoder:
    """A model that reads a few tokens at a time: model(tokens, cache), in one compiled call where possible.

    `describe` returns the description of the model, or None if the compiled form does not implement what it is now.
    """

    def __init__(self, model: Any, describe: Callable[[Any], DecoderDescription | None]) -> None:
        self.model = model
        self.describe = describe
        self.hooks = -1  # RemovableHandle.next_id when the model was last checked
        self.description: DecoderDescription | None = None  # whose references keep the model's tensors in memory
        self.cache: Cache | None = None  # the cache last checked
        self.addresses: Any = None
        self.angles: Tensor | None = None
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
            is_observed = _has_any_global_hook()
            self.hooks, self.cache = -1 if is_observed else RemovableHandle.next_id, None  # its removal changes no id
            self.description = None if is_observed or not can_run_decoders() else self.describe(self.model)
        if self.cache is not cache:
            self.cache, self.most = cache, 0
            if self.description is not None:
                self.prepare(self.description, cache, len(tokens))
        return tokens.numel() <= self.most

    def can_compile(self) -> bool:
        """Return whether compiled code implements the model as it is now, if nothing observes it."""
        description = self.describe(self.model) if can_run_decoders() else None
        return description is not None and description.fits()

    def prepare(self, description: DecoderDescription, cache: Cache, b: int) -> None:
        """List the addresses that compiled code reads, if all tensors of the model and of the cache fit."""
        of_cache = list_cache_parts(cache, description, b)
        if not description.fits() or not all(part.fits() for group in of_cache for part in group):
            return
        groups = [*description.parts, *of_cache]
        fields = [n for group in groups for n in list_fields(group)]
        self.addresses = (ctypes.c_int64 * len(fields))(*fields)
        self.angles = None if description.make_angles is None else description.make_angles(cache.capacity).contiguous()
        self.most = min(find_most_vectors(group) for group in groups)

    def run(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Compute the logits in one compiled call."""
        from regard.models import numba_decoder  # imports numba, which is installed if this is called

        one, several, (b, t) = self.description, torch.get_num_threads(), tokens.shape
        assert one is not None
        starts = cache.advance(t)
        firsts = starts.tolist() if isinstance(starts, Tensor) else [starts] * b
        positions = [first + step for first in firsts for step in range(t)]
        wanted = list_outputs(cache.wanted, b, t)
        query_width, key_width = one.heads * one.head_width, one.key_heads * one.head_width
        shorts = count_shorts(max(one.width, query_width, one.inner))
        size = b * t * (one.width + 2 + shorts) + cache.capacity
        allocate = partial(torch.empty, dtype=torch.float32, device="cpu")
        own = allocate(several, size)
        shared = allocate(b * t * (2 * query_width + 2 * key_width + one.width + 2 * one.inner))
        logits = allocate(b, len(wanted) // b, one.vocabulary)
        counters = (ctypes.c_int64 * (1 + several * (numba_decoder.STAGES * one.layers + 1)))()
        places, outputs = (torch.tensor(x, device="cpu") for x in (positions, wanted))
        threads.run_callback(
            numba_decoder.run_worker,
            several,
            threads=several,
            layers=one.layers,
            count=b * t,
            new=t,
            output_count=len(wanted),
            heads=one.heads,
            key_heads=one.key_heads,
            head_width=one.head_width,
            width=one.width,
            inner=one.inner,
            capacity=cache.capacity,
            vocabulary=one.vocabulary,
            shorts=shorts,
            size=size,
            has_rms_norms=one.has_rms_norms,
            has_bfloat16_cache=cache.dtype == torch.bfloat16,
            barrier=threads.find_barrier_address(),
            counters=ctypes.addressof(counters),
            positions=places,
            outputs=outputs,
            parts=ctypes.addressof(self.addresses),
            rotary=self.angles,
            x=one.embed(tokens.flatten(), places),
            own=own,
            shared=shared,
            logits=logits,
            epsilon=one.epsilon,
            scale=one.scale,
        )
        return logits


def can_run_decoders() -> bool:
    """Return whether torch's threads can run a compiled decoder, which needs OpenMP's barrier."""
    return threads.can_run_loops() and bool(threads.find_barrier_address())


def list_outputs(wanted: int | Tensor | None, b: int, t: int) -> list[int]:
    """List which of b rows of t vectors Cache.select_wanted selects, as indices into b t vectors."""
    if isinstance(wanted, Tensor):
        return [row * t + place for row, place in enumerate(wanted.tolist())]
    return [row * t + place for row in range(b) for place in range(0 if wanted is None else t - wanted, t)]


def is_modified(module: nn.Module) -> bool:
    """Return whether a module is in training mode, has hooks or a replaced forward, or is an embedding with max_norm."""
    has_hooks = module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(has_hooks) or getattr(module, "max_norm", None) is not None


def list_norm_parts(norm: Any, width: int) -> list[ExpectedTensor]:
    """List the weight and the bias of a norm; an RMS norm has no bias."""
    bias = ExpectedTensor(norm.bias, (width,), (torch.float32,)) if isinstance(norm, nn.LayerNorm) else NO_TENSOR
    return [ExpectedTensor(norm.weight, (width,), (torch.float32,)), bias]


def list_matrix_parts(module: Any, rows: int, columns: int) -> list[ExpectedTensor]:
    """List the numbers, scales, bias and scales of groups of a linear layer, or of an embedding that is the head."""
    module = module.matrix if isinstance(module, QuantizedEmbedding) else module
    none, bias = NO_TENSOR, ExpectedTensor(getattr(module, "bias", None), (rows,), (torch.float32, None))
    if not isinstance(module, QuantizedLinear):
        return [ExpectedTensor(module.weight, (rows, columns), (torch.float32,)), none, bias, none]
    if module.values.dtype == torch.int8:
        scales = ExpectedTensor(module.scales, (rows,), (torch.float32,))
        groups = ExpectedTensor(module.group_scales, (rows, count_group_scales(columns)), (torch.uint8,))
        return [ExpectedTensor(module.values, (rows, columns), (torch.int8,)), scales, bias, groups]
    if module.values.dtype == torch.uint8:
        padded = pad_columns(columns) if module.columns == columns else 0
        scales = ExpectedTensor(module.scales, (rows, 2, padded // GROUP), (torch.bfloat16,))
        return [ExpectedTensor(module.values, (rows, padded // 2), (torch.uint8,)), scales, bias, none]
    return [
        ExpectedTensor(module.values, (rows, columns), tuple(DTYPES)),
        ExpectedTensor(module.scales, (), (None,)),
        bias,
        none,
    ]


def list_cache_parts(cache: Cache, description: DecoderDescription, b: int) -> list[list[ExpectedTensor]]:
    """List the keys and values of each layer."""
    shape = b, description.key_heads, cache.capacity, description.head_width
    dtype = torch.bfloat16 if cache.dtype == torch.bfloat16 else torch.float32
    return [[ExpectedTensor(x, shape, (dtype,)) for x in layer] for layer in cache.keys_and_values]


def is_matrix(group: list[ExpectedTensor]) -> bool:
    """Return whether these are the parts of a matrix, and not of a norm or a cache."""
    return len(group) == FIELDS - 1


def find_most_vectors(group: list[ExpectedTensor]) -> int:
    """Return for how many vectors the compiled form reads a matrix faster than the model does."""
    numbers = group[0].tensor
    return MOST[numbers.dtype] if is_matrix(group) and numbers is not None else max(MOST.values())


def list_fields(group: list[ExpectedTensor]) -> list[int]:
    """Return what compiled code reads of a matrix, 0 for all of one that a model lacks, or the addresses of other tensors."""
    tensors = [part.tensor for part in group]
    if is_matrix(group):
        return [0] * FIELDS if tensors[0] is None else describe_matrix(tensors)
    return [0 if x is None else x.data_ptr() for x in tensors]
