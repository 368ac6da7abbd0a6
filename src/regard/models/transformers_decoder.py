"""A model of transformers of Llama's kind as `regard.generate` calls it, a few tokens in one compiled call."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.generate.kv_cache import Cache
from regard.generate.quantization import choose_cache_dtype
from regard.matmul import QuantizedLinear
from regard.matmul.float32_linear import LEAST
from regard.models.compiled_decoder import (
    CompiledDecoder,
    DecoderDescription,
    ExpectedTensor,
    is_modified,
    list_matrix_parts,
    list_norm_parts,
)

FAMILIES = ("Llama", "Mistral", "Qwen2")  # whose blocks compute the same; queries, keys and values may have biases
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.up_proj", "mlp.down_proj", "mlp.gate_proj")
OWN_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
PARTS = {nn.Linear, QuantizedLinear, nn.Embedding, nn.ModuleList}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the length of the text
ATTENTION = ("eager", "sdpa")  # implementations of transformers that take a mask of four axes


class DecoderSizes(NamedTuple):
    """The sizes of a model, as `regard.generate` reads them."""

    layers: int
    heads: int
    context: int
    vocabulary: int


def make_cache(cache: Cache, dtype: torch.dtype | None) -> Any:
    """Return an empty cache of transformers, whose `update` appends keys and values to a `Cache` and returns all of them.

    Slots that a shorter text has not written hold zeros. Keys and values are stored in a dtype, or their own.
    """

    def update(k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = cache.layer(layer, dtype)(k, v)[:2]
        if isinstance(cache.lengths, Tensor):  # a weight of 0 times whatever memory held may be NaN
            unwritten = torch.arange(keys.shape[2], device=keys.device) >= cache.lengths[:, None]
            keys, values = (x.masked_fill(unwritten[:, None, :, None], 0) for x in (keys, values))
        return keys, values

    empty = sys.modules["transformers"].DynamicCache()
    empty.update = update
    return empty


class TransformersDecoder(nn.Module):
    """A causal language model of transformers, Llama, Mistral or Qwen2, that `regard.generate` continues texts with.

    `regard.generate(TransformersDecoder(model), tokens, 100)` gives the tokens that the model would, by the compiled code of
    GPT-2's: on a CPU in float32, or with the weights of `regard.quantise(model, "int8")`. Raises ConfigError for another
    model, or one with a sliding window.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config: Any = getattr(model, "config", None)
        if find_family(model) is None:
            names = ", ".join(f"{name}ForCausalLM" for name in FAMILIES)
            raise ConfigError(
                f"expected a model of transformers among {names}, without a sliding window; got {type(model).__name__}. "
                "Generate with its own method generate instead."
            )
        self.model = model
        self.config = DecoderSizes(
            config.num_hidden_layers, config.num_attention_heads, config.max_position_embeddings, config.vocab_size
        )
        self.training = model.training  # train() would set the parts of the model, too

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute the logits (b, t, n) of the next token after each of (b, t), or after those that the cache selects."""
        if cache is None:
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
            return logits
        model: Any = self.model
        positions = cache.extend(tokens).expand(tokens.shape)
        if cache.longest == tokens.shape[-1]:  # the first tokens: causal attention, which computes half of the scores of a mask
            mask = None
        else:
            visible = torch.arange(cache.longest, device=tokens.device) <= positions.unsqueeze(-1)  # (b, t, keys)
            mask = make_mask(visible.unsqueeze(1), model)
        projections = [layer.self_attn.k_proj for layer in model.model.layers]
        stored = choose_cache_dtype(projections, model.model.norm.weight.dtype)
        output = model.model(  # without the head, whose logits only some vectors need
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{find_cache_name(model.model): make_cache(cache, stored)},
        )
        return cast(Tensor, model.lm_head(cache.select_wanted(output.last_hidden_state)))

    def reading(self) -> Callable[[Tensor, Any], Tensor]:
        """Return the model in the form for generation: called with few new tokens and a cache."""
        return CompiledDecoder(self, describe_decoder)


def find_family(model: Any) -> str | None:
    """Return the family of a model whose blocks compiled code implements, or None."""
    kind = type(model)
    config: Any = getattr(model, "config", None)
    found = next((name for name in FAMILIES if kind.__name__ == f"{name}ForCausalLM"), None)
    if found is None or not kind.__module__.startswith("transformers.models."):
        return None
    slides = (found == "Mistral" and config.sliding_window is not None) or "sliding_attention" in getattr(
        config, "layer_types", ()
    )
    return None if slides or config._attn_implementation not in ATTENTION else found


def make_mask(visible: Tensor, model: Any) -> Tensor:
    """Return a mask of visible keys (b, 1, t, keys) as the attention of a model reads it."""
    if model.config._attn_implementation == "sdpa":
        return visible
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill(~visible, lowest)


def find_cache_name(model: nn.Module) -> str:
    """Return the name of the argument that takes a cache: older versions of transformers call it past_key_values."""
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def describe_decoder(decoder: TransformersDecoder) -> DecoderDescription | None:
    """Describe a model for compiled code, or return None if it has other parts or settings than those of its family."""
    model: Any = decoder.model
    family, config = find_family(model), model.config
    if family is None or not has_standard_parts(model, family):
        return None
    width, inner, heads, key_heads = (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    head_width = getattr(config, "head_dim", None) or width // heads
    query_width, key_width, layers = heads * head_width, key_heads * head_width, model.model.layers
    if width * width < LEAST or len(layers) != config.num_hidden_layers or head_width % 2:
        return None
    sizes = [(query_width, width), (key_width, width), (key_width, width), (width, query_width)]
    sizes += [(inner, width), (width, inner), (inner, width)]
    parts = [list_matrix_parts(model.lm_head, config.vocab_size, width), list_norm_parts(model.model.norm, width)]
    for layer in layers:
        parts += [list_norm_parts(norm, width) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        matrices = [layer.get_submodule(name) for name in (*MATRICES, *FEED_FORWARD)]
        parts += [list_matrix_parts(module, *size) for module, size in zip(matrices, sizes, strict=True)]
    embedding = model.model.embed_tokens
    return DecoderDescription(
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        width=width,
        inner=inner,
        vocabulary=config.vocab_size,
        layers=len(layers),
        epsilon=config.rms_norm_eps,
        scale=layers[0].self_attn.scaling,
        embed=lambda tokens, positions: embedding(tokens),
        embedding=[ExpectedTensor(embedding.weight, (config.vocab_size, width), (torch.float32,))],
        parts=parts,
        has_rms_norms=True,
        make_angles=make_angles_of(model),
    )


def make_angles_of(model: Any) -> Callable[[int], Tensor]:
    """Return a function of n: the cosines and sines (n, 2, head_width) by which a model rotates at the first n positions."""

    def make_angles(count: int) -> Tensor:
        like = model.model.embed_tokens.weight[:1]
        cosines, sines = model.model.rotary_emb(like, position_ids=torch.arange(count)[None])
        return torch.stack([cosines[0], sines[0]], 1)

    return make_angles


def has_standard_parts(model: Any, family: str) -> bool:
    """Return whether a model has exactly the parts that compiled code implements, whatever their weights."""
    config, module = model.config, type(model).__module__
    own = {f"{family}{name}" for name in OWN_PARTS}

    def is_known(part: nn.Module) -> bool:
        kind = type(part)
        is_own = kind.__module__ == module and kind.__name__ in own
        return (is_own or kind in PARTS or kind.__name__ == "SiLUActivation") and not is_modified(part)

    norms = [part for part in model.modules() if type(part).__name__ == f"{family}RMSNorm"]
    return (
        config.hidden_act == "silu"
        and config.rope_parameters["rope_type"] in ROTARY_TYPES
        and all(map(is_known, model.modules()))
        and all(norm.variance_epsilon == config.rms_norm_eps for norm in norms)
        and len({layer.self_attn.scaling for layer in model.model.layers}) == 1
    )
