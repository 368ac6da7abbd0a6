"""Small random layers of Hugging Face: one layer of a family's model, fed with vectors, and its attention alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from observe.families import DEEPSEEK, ENDS, GPT, IMAGE, LLAMA, T5, TEXT, WIDE, WIDTH, WORDS
from observe.family import widen
from regard import Causal, Everything, Window

ALL = {"expects": Everything()}
NEAR = {"expects": Causal() & Window(2)}


class Embedded(nn.Module):
    """A model of one layer, from vectors to vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.width = model, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Encoded(Embedded):
    """The same of an encoder, which knows no cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state


class Alone(nn.Module):
    """The attention of a layer alone, with what the model would hand it."""

    def __init__(self, model: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.width = attention, WIDTH
        self.rotary = getattr(model, "rotary_emb", None)
        self.causal = attention.is_causal

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        turns = {} if self.rotary is None else {"position_embeddings": self.rotary(x, torch.arange(t)[None])}
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        mask = torch.zeros(t, t, dtype=x.dtype).masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
        returned = self.attention(x, attention_mask=mask if self.causal else None, **turns)
        return returned[0] if isinstance(returned, tuple) else returned


@dataclass(frozen=True, eq=False)
class Family:
    """A family's model of one layer, and the arguments of examine."""

    name: str
    model: str
    settings: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[nn.Module], nn.Module] = Embedded
    spread: float = 1.0
    quick: bool = False

    def layer(self) -> nn.Module:
        """The layer, in evaluation."""
        import transformers

        transformers.logging.set_verbosity_error()
        chosen = getattr(transformers, self.model)
        torch.manual_seed(3)
        model = chosen(chosen.config_class(**{**self.settings, "num_hidden_layers": 1})).eval()
        widen(model, self.spread)
        return self.wrap(model)


def isolate_attention(path: str) -> Callable[[nn.Module], nn.Module]:
    """The attention of a model's first layer alone."""
    return lambda model: Alone(model, model.get_submodule(path))


def isolate_picture_layer(path: str) -> Callable[[nn.Module], nn.Module]:
    """A layer of a model of pictures, from vectors to vectors."""

    class Pictured(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.layer, self.width = model.get_submodule(path), WIDTH

        def forward(self, x: Tensor) -> Tensor:
            returned = self.layer(x, attention_mask=None) if "lip" in type(self.layer).__name__.lower() else self.layer(x)
            return returned[0] if isinstance(returned, tuple) else returned

    return Pictured


SLIDING = {"sliding_window": 3}
FAMILIES = [
    Family("gpt2", "GPT2Model", {**GPT, "n_layer": 1}, quick=True),
    Family("llama: rotary, grouped", "LlamaModel", LLAMA, quick=True),
    Family("llama's attention alone", "LlamaModel", LLAMA, wrap=isolate_attention("layers.0.self_attn"), quick=True),
    Family("mistral: a window", "MistralModel", {**LLAMA, **SLIDING}, NEAR, quick=True),
    Family("qwen2", "Qwen2Model", LLAMA),
    Family("qwen3: norms of queries and keys", "Qwen3Model", WIDE),
    Family("gemma", "GemmaModel", WIDE),
    Family("gemma2: softcap and a window", "Gemma2Model", {**WIDE, **SLIDING, "attn_logit_softcapping": 3.0}, NEAR, quick=True),
    Family(
        "gpt_oss: sinks", "GptOssModel", {**WIDE, **SLIDING, "num_local_experts": 2, "num_experts_per_tok": 2}, NEAR, quick=True
    ),
    Family(
        "bloom: ALiBi", "BloomModel", {**ENDS, "vocab_size": WORDS, "hidden_size": WIDTH, "n_layer": 1, "n_head": 4}, quick=True
    ),
    Family("falcon: ALiBi, one key head", "FalconModel", {**TEXT, "alibi": True}),
    Family("mpt: ALiBi", "MptModel", {**ENDS, "vocab_size": WORDS, "d_model": WIDTH, "n_layers": 1, "n_heads": 4}),
    Family("gpt_neox: rotary of a part", "GPTNeoXModel", TEXT),
    Family("gptj", "GPTJModel", {**GPT, "n_layer": 1, "rotary_dim": 6}),
    Family("opt", "OPTModel", {**TEXT, "ffn_dim": 37, "word_embed_proj_dim": WIDTH}),
    Family("phi3", "Phi3Model", LLAMA),
    Family("cohere", "CohereModel", LLAMA),
    Family("olmo2", "Olmo2Model", LLAMA),
    Family("stablelm", "StableLmModel", {**LLAMA, "num_attention_heads": 6}),
    Family("deepseek_v3: latent keys", "DeepseekV3Model", DEEPSEEK),
    Family("granite: a stated scale", "GraniteModel", {**LLAMA, "attention_multiplier": 0.3}, {"scale": 0.3}),
    Family("bert", "BertModel", TEXT, ALL, Encoded, quick=True),
    Family("bert's attention alone", "BertModel", TEXT, ALL, isolate_attention("encoder.layer.0.attention.self"), quick=True),
    Family("roberta", "RobertaModel", TEXT, ALL, Encoded),
    Family("albert", "AlbertModel", {**TEXT, "embedding_size": WIDTH}, ALL, Encoded),
    Family("modernbert: rotary", "ModernBertModel", {**TEXT, "local_attention": 6}, ALL, Encoded),
    Family(
        "t5's encoder: relative positions, scale 1",
        "T5EncoderModel",
        {**T5, "num_layers": 1},
        {**ALL, "scale": 1.0},
        Encoded,
        0.6,
    ),
    Family(
        "deberta-v2: places apart",
        "DebertaV2Model",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        ALL,
        Encoded,
    ),
    Family("vit", "ViTModel", IMAGE, ALL, isolate_picture_layer("layers.0"), quick=True),
    Family("clip's vision", "CLIPVisionModel", IMAGE, ALL, isolate_picture_layer("encoder.layers.0")),
    Family("siglip", "SiglipVisionModel", IMAGE, ALL, isolate_picture_layer("encoder.layers.0")),
    Family("dinov2", "Dinov2Model", IMAGE, ALL, isolate_picture_layer("encoder.layer.0")),
]
