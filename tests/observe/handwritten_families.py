"""Families of models in transformers whose attention is written out by hand, beside the attentions that they hand out."""

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from observe.eager_weights import find_map, list_attentions, run
from observe.families import BOTH, ENDS, GPT, IMAGE, SIZES, TEXT, WIDTH, WORDED, WORDS, text
from observe.family import ANY, RIGHT, Family, Widened, draw_pictures_and_words, pairs, pixels, tokens
from observe.handwritten_media_families import MEDIA

READING = [
    Family("git", "GitModel", {**TEXT, "vision_config": IMAGE}, draw_pictures_and_words, RIGHT),
    text(
        "gpt_neo",
        "GPTNeoModel",
        {
            **ENDS,
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "vocab_size": WORDS,
        },
        quick=True,
    ),
    text("gptj", "GPTJModel", {**GPT, "rotary_dim": 4}),
    text("codegen", "CodeGenModel", {**GPT, "rotary_dim": 4}),
    text("bloom", "BloomModel", {**ENDS, "hidden_size": WIDTH, "n_layer": 3, "n_head": 4, "vocab_size": WORDS}),
    text("mpt", "MptModel", {"d_model": WIDTH, "n_layers": 3, "n_heads": 4, "vocab_size": WORDS, "max_seq_len": 64}),
    text("openai-gpt", "OpenAIGPTModel", GPT),
    text(
        "xglm",
        "XGLMModel",
        {**ENDS, "d_model": WIDTH, "num_layers": 3, "attention_heads": 4, "ffn_dim": 36, "vocab_size": WORDS},
    ),
    text("gpt_neox_japanese", "GPTNeoXJapaneseModel", TEXT),
    text("deberta", "DebertaModel", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    text("deberta_v2", "DebertaV2Model", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    text(
        "xlnet",
        "XLNetModel",
        {**ENDS, "d_model": WIDTH, "n_layer": 3, "n_head": 4, "d_inner": 36, "vocab_size": WORDS},
        quick=True,
    ),
    text("xlm", "XLMModel", {**WORDED, "emb_dim": WIDTH, "n_layers": 3, "n_heads": 4}),
    text("flaubert", "FlaubertModel", {**WORDED, "emb_dim": WIDTH, "n_layers": 3, "n_heads": 4}),
    text("mpnet", "MPNetModel", TEXT),
    text("megatron_bert", "MegatronBertModel", TEXT),
    text("rembert", "RemBertModel", {**TEXT, "input_embedding_size": 24}),
    text("roformer", "RoFormerModel", TEXT),
    text("squeezebert", "SqueezeBertModel", {**TEXT, "embedding_size": WIDTH}),
    text("convbert", "ConvBertModel", TEXT),
    text("longformer", "LongformerModel", {**TEXT, "attention_window": 4}),
    text("ibert", "IBertModel", TEXT),
    text("nystromformer", "NystromformerModel", {**TEXT, "num_landmarks": 13, "segment_means_seq_len": 13}),
    text(
        "funnel",
        "FunnelModel",
        {"d_model": WIDTH, "n_head": 4, "d_head": 12, "d_inner": 36, "block_sizes": [2, 1], "vocab_size": WORDS},
    ),
    text(
        "reformer",
        "ReformerModel",
        {
            **TEXT,
            "attn_layers": ["local", "local"],
            "feed_forward_size": 36,
            "local_attn_chunk_length": 13,
            "axial_pos_embds": False,
            "attention_head_size": 12,
        },
    ),
    Family(
        "prophetnet",
        "ProphetNetModel",
        {
            **ENDS,
            "hidden_size": WIDTH,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "vocab_size": WORDS,
            "encoder_ffn_dim": 36,
            "decoder_ffn_dim": 36,
            "decoder_start_token_id": 1,
        },
        pairs,
        ANY,
    ),
    Family(
        "led",
        "LEDModel",
        {**BOTH, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        pairs,
        RIGHT,
    ),
    Family(
        "swinv2",
        "Swinv2Model",
        {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": 4},
        pixels,
    ),
    Family(
        "imagegpt",
        "ImageGPTModel",
        {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 64},
        tokens,
    ),
    text("big_bird", "BigBirdModel", {**TEXT, "attention_type": "original_full"}),
    text(
        "bark",
        "BarkSemanticModel",
        {
            "block_size": 64,
            "input_vocab_size": WORDS,
            "output_vocab_size": WORDS,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": WIDTH,
        },
    ),
    Family(
        "canine",
        "CanineModel",
        {
            **SIZES,
            "max_position_embeddings": 64,
            "local_transformer_stride": 8,
            "num_hash_functions": 3,
            "num_hash_buckets": 16,
        },
        tokens,
        RIGHT,
    ),
    Family(
        "cpmant",
        "CpmAntModel",
        {
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "num_attention_heads": 4,
            "dim_head": 12,
            "dim_ff": 36,
            "num_hidden_layers": 2,
            "prompt_types": 4,
            "prompt_length": 3,
            "segment_types": 4,
        },
    ),
    text("lilt", "LiltModel", {**TEXT, "max_2d_position_embeddings": 64, "channel_shrink_ratio": 4}),
    text("tapas", "TapasModel", {**TEXT, "type_vocab_sizes": [3, 4, 4, 2, 4, 4, 4]}),
    Family("yoso", "YosoModel", TEXT),
    Family(
        "fsmt",
        "FSMTModel",
        {
            **BOTH,
            "langs": ["en", "de"],
            "src_vocab_size": WORDS,
            "tgt_vocab_size": WORDS,
        },
        pairs,
        RIGHT,
    ),
    Family("mvp", "MvpModel", BOTH, pairs, ANY),
    Family(
        "trocr",
        "TrOCRForCausalLM",
        {**WORDED, "d_model": WIDTH, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 31},
        tokens,
        ANY,
    ),
]
HAND = [*READING, *MEDIA]

SINGLE = ["xglm", "dab_detr"]  # compute in float32 only
IN_ORDER = ["funnel"]  # hands out those of its encoder and its decoder as one
TOWERS = {"git": "encoder.layer"}  # beside an encoder of images, which is recorded through the registry
UNCOMPARED = {  # with attentions that the model hands out
    "longformer": "recorded, see test_block_sparse; it hands out the weights of each window in a layout of its own",
    "led": "recorded, see test_block_sparse; it hands out the weights of each window in a layout of its own",
    "yoso": "its weights are no softmax, and it hands out none",
    "groupvit": "it hands out the weights of its groups alone",
    "squeezebert": "it hands out scores",
    "prophetnet": "a decoder layer attends twice, once for each stream, both in recording[name]",
    "gptj": "it hands out none",
    "codegen": "it hands out none",
    "canine": "characters attend in chunks, each of them a map",
    "cpmant": "it hands out those of its tokens, without the prompt",
    "lilt": "a layer attends twice, to words and to their places, both in recording[name]",
    "lxmert": "it hands out those of words and of pictures as two lists",
    "donut": "it hands out one for each stage",
    "swin2sr": "it hands out one for each stage",
    "hiera": "it hands out those of windows on an axis of their own",
    "timesformer": "it hands out those within a frame",
    "superglue": "it hands out those of a pair of pictures on an axis of their own",
    "pvt_v2": "it hands out none",
    "cvt": "it hands out none",
    "levit": "it hands out none",
    "mobilevit": "it hands out none",
    "wavtokenizer": "it hands out none",
    "got_ocr2": "it hands out none",
    "clvp": "it hands out none",
    "zoedepth": "it hands out none",
    "omdet_turbo": "it hands out those of deformable attention, which has no pairs of tokens, among them",
    "dab_detr": "it hands out none of its own",
    "grounding_dino": "it hands out those of deformable attention, which has no pairs of tokens, among them",
    "mm_grounding_dino": "it hands out those of deformable attention, which has no pairs of tokens, among them",
    "slanet": "it hands out those of its decoder, step by step",
    "slanext": "it hands out those of its decoder, step by step",
    "oneformer": "it hands out those of its decoder, self and cross attention as a pair",
    "flava": "it hands out those of a picture, of words and of both as three lists",
}
UNSOFTENED = ("longformer", "led")  # their weights are no softmax of the shape of a map


class OwnWeights(TorchFunctionMode):
    """Keeps every softmax that a model computes, and the one that each call of a kernel stands for."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inside = {"softmax": self.soften_inside, "scaled_dot_product_attention": self.attend_inside}
        inner = mock.patch.multiple(F, **inside) if name == "multi_head_attention_forward" else nullcontext()
        with inner:
            result = func(*args, **kwargs)
        if name == "softmax":
            self.found.append(result.detach())
        elif func is F.scaled_dot_product_attention:
            self.found.append(soften(*args, **kwargs))
        return result

    def soften_inside(self, *args: Any, **kwargs: Any) -> Tensor:
        """The softmax of a function that calls it by its name in torch.nn.functional, unseen by a mode."""
        self.found.append(torch.softmax(*args, **kwargs).detach())
        return torch.softmax(*args, **kwargs)

    def attend_inside(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        """The same of the kernel."""
        self.found.append(soften(q, k, v, mask, is_causal=is_causal))
        return torch._C._nn.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)


def soften(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
    """The weights of F.scaled_dot_product_attention, as its documentation defines them."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (given.get("scale") or 1 / math.sqrt(q.shape[-1]))
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask
    return scores.softmax(-1).nan_to_num()


def compare_with_own_weights(family: Family, side: str) -> tuple[int, float]:
    """The number of maps, and the largest difference of one from the nearest softmax of its size that the model computes.

    Of weights that are no softmax, it is that of the map times the values from the layer's output.
    """
    model, again = (family.build(torch.float32 if family.name in SINGLE else torch.float64) for _ in range(2))
    given = family.feed(model, side)
    own = OwnWeights()
    with torch.no_grad() if family.name in SINGLE else Widened():
        _, recording = run(model, given, recorded=True)
        with own:
            run(again, given)  # OmDet-Turbo caches what it made of words
    differences = []
    for call in recording.calls:
        if call.kind == "implicit":
            differences.append(call.map.certificate().error)
            continue
        weights = call.map.dense().double()
        alike = [x for x in own.found if x.numel() == weights.numel()]
        alike += [x.transpose(1, 2) for x in alike if x.dim() == 5]  # windows before or after the heads
        differences.append(min(find_largest_difference(x.reshape(weights.shape), weights) for x in alike))
    return len(differences), max(differences)


def find_largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two matrices; none where both are NaN, as rows that see nothing are in some models."""
    return float((one - other).abs().masked_fill(one.isnan() & other.isnan(), 0).nan_to_num(nan=math.inf).max())


def compare_with_attentions(family: Family, side: str) -> tuple[int, float]:
    """The number of maps, and the largest difference of one from the attention that the same model hands out, in float64."""
    single = family.name in SINGLE
    model = family.build(torch.float32 if single else torch.float64)
    given = family.feed(model, side)
    with torch.no_grad() if single else Widened():
        _, recording = run(model, given, recorded=True)
        output, _ = run(model, given, output_attentions=True)
    found = []
    for key, expected in list_attentions(output).items():
        if family.name in IN_ORDER:
            m = recording.calls[key[2]].map
        elif family.name in TOWERS:
            m = recording.map(f"{TOWERS[family.name]}.{key[2]}.attention.self")
        else:
            m = find_map(recording, key)
        assert m.shape == expected.shape
        found.append(float((m.dense() - expected).abs().max()))
    return len(found), max(found)
