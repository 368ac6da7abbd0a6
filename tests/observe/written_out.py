"""Families of models in transformers whose attention is written out by hand, where no door is: they are missed by name."""

from observe.families import BOTH, ENDS, GPT, IMAGE, TEXT, WIDTH, WORDED, WORDS, text
from observe.family import ANY, RIGHT, Family, captioned, pairs, pixels, tokens

HAND = [
    Family(
        "git", "GitModel", {**TEXT, "vision_config": IMAGE}, captioned, RIGHT
    ),  # their attention is written out: there is no kernel to meet
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
