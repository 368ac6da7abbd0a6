"""Families of models in transformers whose attention is written out by hand, beside the attentions that they hand out."""

import torch

from observe.eager_weights import handed_out, mapped, run
from observe.families import BOTH, ENDS, GPT, IMAGE, TEXT, WIDTH, WORDED, WORDS, text
from observe.family import ANY, RIGHT, Family, Widened, captioned, pairs, pixels, tokens

HAND = [
    Family("git", "GitModel", {**TEXT, "vision_config": IMAGE}, captioned, RIGHT),
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
]

WINDOWED = ["longformer", "led"]  # overlapping blocks, whose keys are not followed
SINGLE = ["xglm"]  # computes in float32 only
IN_ORDER = ["funnel"]  # hands out those of its encoder and its decoder as one
TOWERS = {"git": "encoder.layer"}  # beside an encoder of images, which is recorded through the registry
UNCOMPARED = {
    "squeezebert": "recorded; it hands out scores, not weights",
    "prophetnet": "recorded; a decoder layer attends twice, once for each stream, both in recording[name]",
    "gptj": "recorded; it hands out no attentions",
    "codegen": "recorded; it hands out no attentions",
}


def compare_with_attentions(family: Family, side: str) -> tuple[int, float]:
    """The number of maps, and the largest difference of one from the attention that the same model hands out, in float64."""
    single = family.name in SINGLE
    model = family.build(torch.float32 if single else torch.float64)
    given = family.feed(model, side)
    with torch.no_grad() if single else Widened():
        _, recording = run(model, given, recorded=True)
        output, _ = run(model, given, output_attentions=True)
    found = []
    for key, expected in handed_out(output).items():
        if family.name in IN_ORDER:
            m = recording.calls[key[2]].map
        elif family.name in TOWERS:
            m = recording.map(f"{TOWERS[family.name]}.{key[2]}.attention.self")
        else:
            m = mapped(recording, key)
        assert m.shape == expected.shape
        found.append(float((m.dense() - expected).abs().max()))
    return len(found), max(found)
