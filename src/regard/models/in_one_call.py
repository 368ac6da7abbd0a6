"""GPT-2 on a few tokens, in one call: its hundred small operations take long beside the time of reading its weights.

The model stays the definition. This is equal to it, and steps in only where nobody looks on and no part is another.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from regard.compiled import threads
from regard.compiled.watched import plain, unwatched
from regard.generate.cache import Cache
from regard.generate.prepared import Rows
from regard.layers.linear import Linear
from regard.layers.multi_head import MultiHeadAttention
from regard.products import Quantised
from regard.products.dense import LEAST

MOST = {torch.float32: 4, torch.int8: 16}  # vectors, by what the matrices hold; more of them are faster product by product
NORMS = ("norm_attention", "norm_feed")  # of a block
MATRICES = ("attention.W_query", "attention.W_key", "attention.W_value", "attention.out_proj", "up", "down")
PARTS = {MultiHeadAttention, Linear, Quantised, Rows, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}
Form = tuple[tuple[int, ...], tuple[torch.dtype | None, ...]]  # the shape of a tensor, and the dtypes it may have


class InOneCall:
    """A GPT-2 that reads a few tokens at a time: model(tokens, cache), in one call where it can be."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooks = -1  # how many there had ever been when the model was last looked at
        self.tensors: list[Tensor | None] = []  # what it has, which stays in memory while these do
        self.cache: Cache | None = None  # that was last looked at
        self.addresses: Any = None
        self.holds: torch.dtype | None = None  # what the matrices are made of; None where something does not fit

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits of the next token after each of (b, t), or after those that the cache is asked for."""
        if self.suits(tokens, cache):
            return self.run(tokens, cache)
        found: Tensor = self.model(tokens, cache)
        return found

    def suits(self, tokens: Tensor, cache: Cache) -> bool:
        """Whether nothing but the time would tell that the model ran in one call."""
        if tokens.dim() != 2 or not 0 < tokens.numel() <= max(MOST.values()) or not cache.longest or self.model.training:
            return False
        watched = not unwatched() or torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu")
        if watched or torch.is_grad_enabled():
            return False
        if any(not 0 <= token < self.model.config.vocabulary for row in tokens.tolist() for token in row):
            return False  # the model says so
        if self.hooks != RemovableHandle.next_id:  # a part may have got one
            self.hooks, self.cache = RemovableHandle.next_id, None
            self.tensors = every(self.model) if standard(self.model) else []
        if self.cache is not cache:
            both = [*self.tensors, *(x for layer in cache.kept for x in layer)] if self.tensors else []
            self.cache, self.holds = cache, held(both, self.model.config, len(tokens), cache.room) if both else None
            self.addresses = (ctypes.c_int64 * len(both))(*(0 if x is None else x.data_ptr() for x in both))
        return self.holds is not None and tokens.numel() <= MOST[self.holds]

    def run(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The same, compiled."""
        from regard.compiled.shorts import VECTORS  # and numba with it, which is there where this is reached
        from regard.models import compiled

        config, several, (b, t) = self.model.config, torch.get_num_threads(), tokens.shape
        starts = cache.advance(t)
        firsts = starts.tolist() if isinstance(starts, Tensor) else [starts] * b
        positions = [first + step for first in firsts for step in range(t)]
        wanted = asked(cache.wanted, b, t)
        spare = b * t + VECTORS  # for vectors that complete the last few
        size = b * t * config.width + cache.room + spare + spare * max(config.width, config.inner)
        own = torch.empty(several, size)
        shared = torch.empty(b * t * (6 * config.width + config.inner))
        logits = torch.empty(b, len(wanted) // b, config.vocabulary)
        counters = (ctypes.c_int64 * (2 + compiled.COUNTED * config.layers))()
        numbers = [(ctypes.c_int64 * len(some))(*some) for some in (tokens.flatten().tolist(), positions, wanted)]
        epsilon = ctypes.c_float(config.epsilon)
        said = [several, config.layers, b * t, t, len(wanted), config.heads, config.width, config.inner, cache.room]
        said += [config.vocabulary, size, threads.meeting()]
        said += [ctypes.addressof(one) for one in (counters, epsilon, *numbers, self.addresses)]
        said += [one.data_ptr() for one in (own, shared, logits)]
        threads.run(compiled.FLOATS if self.holds == torch.float32 else compiled.BYTES, said, several)
        return logits


def asked(wanted: int | Tensor | None, b: int, t: int) -> list[int]:
    """Which of b rows of t vectors those are that cache.asked would pick."""
    if isinstance(wanted, Tensor):
        return [row * t + place for row, place in enumerate(wanted.tolist())]
    return [row * t + place for row in range(b) for place in range(0 if wanted is None else t - wanted, t)]


def standard(model: Any) -> bool:
    """Whether a GPT-2 is made of the parts that the compiled one is made for, whatever numbers these hold."""
    if not threads.usable() or not threads.meeting():
        return False
    known = PARTS | {type(model), type(model.blocks[0])}
    as_made = all(type(part) in known and not changed(part) for part in model.modules()) and not _has_any_global_hook()
    return bool(as_made) and model.norm.eps == model.config.epsilon and all(usual(one, model.config) for one in model.blocks)


def changed(module: nn.Module) -> bool:
    """Whether somebody waits for a module to run, or made it another function."""
    hooked = module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(hooked) or getattr(module, "max_norm", None) is not None


def usual(block: Any, config: Any) -> bool:
    """Whether a block's settings are those of its model, and its GELU is the one by tanh."""
    epsilons = [block.get_submodule(name).eps for name in NORMS]
    gelu = getattr(block.activation, "func", None) is F.gelu and block.activation.keywords == {"approximate": "tanh"}
    return gelu and epsilons == [config.epsilon] * 2 and block.attention.num_heads == config.heads


def held(both: list[Tensor | None], config: Any, b: int, room: int) -> torch.dtype | None:
    """What all matrices hold, where each tensor of a model and its cache is as the compiled one reads it; else None."""
    c, inner = config.width, config.inner
    holds = torch.float32 if both[1] is None else torch.int8  # the scales of the token embedding
    vector: list[Form] = [((c,), (torch.float32,))]

    def rows(count: int, columns: int) -> list[Form]:
        scales, most = (None, None) if holds == torch.float32 else (torch.float32, torch.int64)
        return [((count, columns), (holds,)), ((count,), (scales,)), ((count,), (torch.float32, None)), ((), (most,))]

    ends: list[Form] = [*2 * rows(config.vocabulary, c), *2 * vector, ((config.context, c), (torch.float32,))]
    layer = 4 * vector + 4 * rows(c, c) + rows(inner, c) + rows(c, inner)
    kept: list[Form] = [((b, config.heads, room, c // config.heads), (torch.float32,))] * 2
    known = ends + config.layers * layer + config.layers * kept
    fits = c * c >= LEAST and len(known) == len(both) and all(map(as_read, both, known))
    return holds if fits else None


def as_read(x: Tensor | None, form: Form) -> bool:
    """Whether a tensor lies in memory as the compiled model reads it."""
    shape, kinds = form
    return None in kinds if x is None else x.dtype in kinds and x.shape == shape and x.is_contiguous() and plain(x)


def every(model: Any) -> list[Tensor | None]:
    """What a model has, in the order in which the compiled one is told of it."""
    head = model.tokens if model.head is None else model.head
    found = [*matrix(model.tokens), *matrix(head), model.norm.weight, model.norm.bias, model.positions.weight]
    for block in model.blocks:
        found += [getattr(block.get_submodule(name), kind) for name in NORMS for kind in ("weight", "bias")]
        found += [x for name in MATRICES for x in matrix(block.get_submodule(name))]
    return [None if x is None else x.detach() for x in found]


def matrix(of: Any) -> list[Tensor | None]:
    """The numbers of a linear layer or an embedding, their scales, its bias, and how large its vectors may be."""
    of = of.matrix if isinstance(of, Rows) else of
    small = isinstance(of, Quantised)
    return [of.values, of.scales, of.bias, of.most] if small else [of.weight, None, getattr(of, "bias", None), None]
