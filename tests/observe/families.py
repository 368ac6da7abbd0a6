"""Families of models in transformers whose attention is recorded."""

from typing import Any

import torch

from observe.family import (
    ANY,
    RIGHT,
    WORDS,
    B,
    Family,
    T,
    among,
    clip,
    draw_packed_pictures,
    draw_pictures_and_noise,
    draw_pictures_and_prefix,
    draw_pictures_and_words,
    film,
    pairs,
    pixels,
    spectrum,
    spoken,
    tokens,
    waves,
)

WIDTH, HEADS, GROUPS, LAYERS = 48, 4, 2, 3

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WORDED = {**ENDS, "vocab_size": WORDS}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 36}
TEXT = {**SIZES, **WORDED, "max_position_embeddings": 64}
GPT = {**WORDED, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
LLAMA = {**TEXT, "num_key_value_heads": GROUPS}
WIDE = {**LLAMA, "head_dim": 14}  # heads that are not width / heads wide
NEAR = {"sliding_window": 5}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
BOTH = {
    **WORDED,
    "max_position_embeddings": 64,
    "d_model": WIDTH,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 37,
    "encoder_layerdrop": 0.0,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": HEADS,
    "decoder_ffn_dim": 31,
    "decoder_layerdrop": 0.0,
}
T5 = {**WORDED, "d_model": WIDTH, "d_kv": 7, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
MOONSHINE = {
    **WORDED,
    "hidden_size": WIDTH,
    "intermediate_size": 36,
    "decoder_start_token_id": 1,
    "encoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 3,
    "decoder_num_hidden_layers": LAYERS,
    "decoder_num_attention_heads": HEADS,
}
IMAGE = {**SIZES, "image_size": 12, "patch_size": 4}
TOWERS = {"text_config": {**TEXT, "max_position_embeddings": T}, "vision_config": IMAGE, "projection_dim": 19}
SPEAKING = {"text_config": {**LLAMA, "model_type": "llama"}, "vision_config": {**IMAGE, "model_type": "clip_vision_model"}}
WAVES = {
    **SIZES,
    "vocab_size": 31,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 3),
    "conv_stride": (4, 2),
    "num_conv_pos_embeddings": 5,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
}
DEEPSEEK = {
    **TEXT,
    "num_key_value_heads": HEADS,
    "moe_intermediate_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
}
INDEXED = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8}  # which keys a query sees, an indexer picks
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_expand": 1, "mamba_d_state": 5, "mamba_chunk_size": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 6}
GEMMA = {**WIDE, **NEAR, "attn_logit_softcapping": 3.0}
PACKED = {
    "depth": 2,
    "embed_dim": WIDTH,
    "hidden_size": WIDTH,
    "num_heads": 3,
    "mlp_ratio": 2,
    "patch_size": 2,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}


def text(name: str, model: str, settings: dict[str, Any], **more: Any) -> Family:
    """A family that reads tokens."""
    return Family(name, model, settings, tokens, ANY, **more)


DECODERS = [
    text("gpt2", "GPT2Model", GPT, quick=True),
    text("llama", "LlamaModel", LLAMA, quick=True),
    text("mistral", "MistralModel", {**LLAMA, **NEAR}, quick=True),
    text("qwen2", "Qwen2Model", LLAMA),
    text("qwen3", "Qwen3Model", WIDE),
    text("gemma", "GemmaModel", WIDE),
    text("gemma2", "Gemma2Model", GEMMA, quick=True),
    text("gemma3", "Gemma3TextModel", {**WIDE, **NEAR}),
    text("gpt_oss", "GptOssModel", {**WIDE, **NEAR, "num_local_experts": 3, "num_experts_per_tok": 2}, quick=True),
    text("phi", "PhiModel", LLAMA),
    text("phi3", "Phi3Model", LLAMA),
    text("stablelm", "StableLmModel", {**LLAMA, "num_attention_heads": 6}),
    text("olmo", "OlmoModel", LLAMA),
    text("olmo2", "Olmo2Model", LLAMA),
    text("starcoder2", "Starcoder2Model", {**LLAMA, **NEAR}),
    text("falcon", "FalconModel", {**TEXT, "num_kv_heads": GROUPS, "new_decoder_architecture": True}, apart=True),
    text("falcon, one key head", "FalconModel", TEXT, apart=True),
    text("opt", "OPTModel", {**TEXT, "ffn_dim": 37, "word_embed_proj_dim": WIDTH}),
    text("gpt_neox", "GPTNeoXModel", TEXT),
    text("cohere", "CohereModel", LLAMA),
    text("cohere2", "Cohere2Model", {**WIDE, **NEAR}),
    text("granite", "GraniteModel", {**LLAMA, "attention_multiplier": 0.3}),
    text("mixtral", "MixtralModel", {**LLAMA, "num_local_experts": 3}),
    text("qwen2_moe", "Qwen2MoeModel", {**LLAMA, **EXPERTS}),
    text("qwen3_moe", "Qwen3MoeModel", {**WIDE, **EXPERTS}),
    text("deepseek_v2", "DeepseekV2Model", {**DEEPSEEK, "qk_nope_head_dim": 6, "topk_method": "greedy"}),
    text("deepseek_v3", "DeepseekV3Model", DEEPSEEK, quick=True),
    text("deepseek_v32", "DeepseekV32Model", {**DEEPSEEK, **INDEXED}),
    text(
        "deepseek_v4",
        "DeepseekV4Model",
        {
            **DEEPSEEK,
            **INDEXED,
            "head_dim": 12,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        },
    ),
    Family(
        "minimax_m3",
        "MiniMaxM3VLTextModel",
        {
            **WIDE,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
        },
        tokens,
        RIGHT,  # with padding on the left, the blocks that its own two implementations pick differ
    ),
    text("smollm3", "SmolLM3Model", LLAMA),
    text("bitnet", "BitNetModel", LLAMA),
    text("llama4", "Llama4TextModel", {**WIDE, "attention_chunk_size": 5, "intermediate_size_mlp": 31, "num_local_experts": 3}),
    text("persimmon", "PersimmonModel", TEXT),
    text("glm", "GlmModel", WIDE),
    text("glm4", "Glm4Model", WIDE),
    text("exaone4", "Exaone4Model", {**LLAMA, **NEAR, "sliding_window_pattern": 2}),
    text("nemotron", "NemotronModel", LLAMA),
    text("helium", "HeliumModel", {**LLAMA, "head_dim": 12}),
    text("seed_oss", "SeedOssModel", WIDE),
    text("arcee", "ArceeModel", LLAMA),
    text("apertus", "ApertusModel", LLAMA),
    text("ministral", "MinistralModel", {**WIDE, **NEAR}),
    text("biogpt", "BioGptModel", TEXT),
    text("gpt_bigcode", "GPTBigCodeModel", GPT),
    text(
        "dots1",
        "Dots1Model",
        {**LLAMA, "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    text("olmo3", "Olmo3Model", {**LLAMA, **NEAR}),
    text("olmoe", "OlmoeModel", {**LLAMA, **EXPERTS}),
    text("granitemoe", "GraniteMoeModel", {**LLAMA, "num_local_experts": 3}),
    text("phimoe", "PhimoeModel", {**LLAMA, "num_local_experts": 3}),
    text("ernie4_5", "Ernie4_5Model", WIDE),
    text("hunyuan", "HunYuanDenseV1Model", WIDE),
    text("nanochat", "NanoChatModel", LLAMA),
    text("doge", "DogeModel", LLAMA),
    text("jetmoe", "JetMoeModel", {**LLAMA, "num_key_value_heads": 2, "kv_channels": 12, "num_local_experts": 3}),
    text("lfm2", "Lfm2Model", {**LLAMA, "layer_types": ["conv", "full_attention", "full_attention"]}),
    text("jamba", "JambaModel", {**LLAMA, **MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}),
    text("bamba", "BambaModel", {**LLAMA, **MAMBA, "attn_layer_indices": [1]}),
    text("falcon_h1", "FalconH1Model", {**LLAMA, **MAMBA, "mamba_d_ssm": 48, "head_dim": 12}),
    text("minimax", "MiniMaxModel", {**WIDE, "layer_types": ["full_attention"] * 3, "num_local_experts": 3}),
    text(
        "qwen3_next",
        "Qwen3NextModel",
        {
            **WIDE,
            **DELTA,
            **EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
        },
    ),
    text("glm4_moe", "Glm4MoeModel", {**WIDE, "n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}),
    text(
        "longcat_flash",
        "LongcatFlashModel",
        {
            **DEEPSEEK,
            "num_layers": 2,
            "ffn_hidden_size": 36,
            "expert_ffn_hidden_size": 12,
            "moe_topk": 2,
            "zero_expert_num": 1,
            "head_dim": 6,
        },
    ),
    text("ctrl", "CTRLModel", {**GPT, "dff": 36}),
    text("modernbert-decoder", "ModernBertDecoderModel", {**TEXT, "local_attention": 6}),
]
ENCODERS = [
    text("bert", "BertModel", TEXT, quick=True),
    text("roberta", "RobertaModel", TEXT),
    text(
        "distilbert",
        "DistilBertModel",
        {**ENDS, "dim": WIDTH, "n_layers": 3, "n_heads": 4, "hidden_dim": 37, "vocab_size": WORDS},
    ),
    text("electra", "ElectraModel", {**TEXT, "embedding_size": 23}),
    text("camembert", "CamembertModel", TEXT),
    text("xlm-roberta", "XLMRobertaModel", TEXT),
    text("xlm-roberta-xl", "XLMRobertaXLModel", TEXT),
    text("roberta-prelayernorm", "RobertaPreLayerNormModel", TEXT),
    text("albert", "AlbertModel", {**TEXT, "embedding_size": 23}, quick=True),
    text("modernbert", "ModernBertModel", {**TEXT, "local_attention": 6}, quick=True),
    text("nomic_bert", "NomicBertModel", TEXT),
    text("esm", "EsmModel", {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    text("ernie", "ErnieModel", TEXT),
    text("data2vec", "Data2VecTextModel", TEXT),
    text("bert-generation", "BertGenerationEncoder", TEXT),
    text("eurobert", "EuroBertModel", LLAMA),
    text("xmod", "XmodModel", {**TEXT, "languages": ["en_XX"], "default_language": "en_XX"}),
    text("splinter", "SplinterModel", TEXT),
    text(
        "mobilebert",
        "MobileBertModel",
        {
            **TEXT,
            "embedding_size": 24,
            "true_hidden_size": WIDTH,
            "intra_bottleneck_size": WIDTH,
            "num_feedforward_networks": 2,
        },
        spread=0.3,
    ),
    text("layoutlm", "LayoutLMModel", TEXT),
    text("markuplm", "MarkupLMModel", TEXT),
]
PAIRS = [
    Family("t5", "T5Model", T5, pairs, ANY, spread=0.6, quick=True),
    Family("mt5", "MT5Model", T5, pairs, ANY, spread=0.6),
    Family("umt5", "UMT5Model", T5, pairs, ANY, spread=0.6),
    Family("switch_transformers", "SwitchTransformersModel", {**T5, "num_experts": 3}, pairs, ANY, spread=0.6),
    Family("bart", "BartModel", BOTH, pairs, ANY, quick=True),
    Family("mbart", "MBartModel", BOTH, pairs, ANY),
    Family("marian", "MarianModel", BOTH, pairs, ANY),
    Family("pegasus", "PegasusModel", BOTH, pairs, ANY),
    Family("m2m_100", "M2M100Model", BOTH, pairs, ANY),
    Family("blenderbot", "BlenderbotModel", BOTH, pairs, ANY),
    Family("blenderbot-small", "BlenderbotSmallModel", BOTH, pairs, ANY),
    Family("plbart", "PLBartModel", BOTH, pairs, ANY),
    Family("nllb_moe", "NllbMoeModel", {**BOTH, "num_experts": 3}, pairs, ANY),
    Family("t5gemma", "T5GemmaModel", {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": WORDS}, pairs, ANY),
    Family("moonshine", "MoonshineModel", MOONSHINE, spoken),
    Family(
        "whisper",
        "WhisperModel",
        {**BOTH, "num_mel_bins": 7, "max_source_positions": 17, "max_target_positions": 23},
        spectrum,
        quick=True,
    ),
]
SENSES = [
    Family("vit", "ViTModel", IMAGE, pixels, quick=True),
    Family("deit", "DeiTModel", IMAGE, pixels),
    Family("dinov2", "Dinov2Model", IMAGE, pixels),
    Family("dinov2-registers", "Dinov2WithRegistersModel", IMAGE, pixels),
    Family("dinov3", "DINOv3ViTModel", IMAGE, pixels),
    Family("ijepa", "IJepaModel", IMAGE, pixels),
    Family("vit_msn", "ViTMSNModel", IMAGE, pixels),
    Family("vit_mae", "ViTMAEModel", IMAGE, draw_pictures_and_noise),
    Family(
        "segformer",
        "SegformerModel",
        {"depths": [1] * 4, "sr_ratios": [4, 2, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4]},
        lambda config, side="none": {"pixel_values": torch.randn(B, 3, 32, 32)},
    ),
    Family(
        "blip_2",
        "Blip2ForConditionalGeneration",
        {
            "vision_config": IMAGE,
            "qformer_config": {**TEXT, "encoder_hidden_size": WIDTH},
            "text_config": {**TEXT, "model_type": "opt", "ffn_dim": 37, "word_embed_proj_dim": WIDTH},
            "num_query_tokens": 5,
            "image_token_index": 100,
        },
        draw_pictures_and_prefix,
        beside=8,  # those of its picture and of its queries
    ),
    Family("yolos", "YolosModel", {**IMAGE, "image_size": [12, 12], "num_detection_tokens": 3}, pixels),
    Family("siglip vision", "SiglipVisionModel", IMAGE, pixels, beside=1),
    Family("beit", "BeitModel", {**IMAGE, "use_relative_position_bias": True}, pixels),
    Family("data2vec vision", "Data2VecVisionModel", {**IMAGE, "use_relative_position_bias": True}, pixels, apart=True),
    Family("videomae", "VideoMAEModel", {**IMAGE, "num_frames": 4}, film),
    Family("vivit", "VivitModel", {**IMAGE, "num_frames": 4, "tubelet_size": [2, 4, 4]}, film),
    Family(
        "clip",
        "CLIPModel",
        TOWERS,
        draw_pictures_and_words,
        RIGHT,
        quick=True,
    ),
    Family(
        "siglip",
        "SiglipModel",
        {"text_config": {**TEXT, "projection_size": WIDTH}, "vision_config": IMAGE},
        draw_pictures_and_words,
        RIGHT,
        beside=1,
    ),
    Family("metaclip_2", "MetaClip2Model", TOWERS, draw_pictures_and_words, RIGHT),
    Family("chinese_clip", "ChineseCLIPModel", TOWERS, draw_pictures_and_words, RIGHT),
    Family("altclip", "AltCLIPModel", {**TOWERS, "text_config": {**TEXT, "project_dim": 19}}, draw_pictures_and_words, RIGHT),
    Family("llava", "LlavaModel", {**SPEAKING, "image_token_index": 100, "vision_feature_layer": -1}, among, beside=3),
    Family("aimv2", "Aimv2VisionModel", IMAGE, pixels, beside=1),
    Family("vit_mae", "ViTMAEModel", {**IMAGE, "mask_ratio": 0.0}, pixels),
    Family(
        "qwen2_vl",
        "Qwen2VLModel",
        {"text_config": {**LLAMA, **ROTATED}, "vision_config": PACKED, "image_token_id": 99},
        draw_packed_pictures,
        beside=2,
        quick=True,
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VLModel",
        {
            "text_config": {**LLAMA, **ROTATED},
            "vision_config": {
                **PACKED,
                "out_hidden_size": WIDTH,
                "intermediate_size": 36,
                "fullatt_block_indexes": [1],
                "window_size": 4,
            },
            "image_token_id": 99,
        },
        draw_packed_pictures,
        beside=2,
    ),
    Family(
        "paligemma",
        "PaliGemmaModel",
        {
            "text_config": {**WIDE, "model_type": "gemma"},
            "vision_config": {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False},
            "image_token_index": 100,
            "projection_dim": WIDTH,
        },
        among,
        beside=3,
    ),
    Family(
        "vjepa2",
        "VJEPA2Model",
        {
            **SIZES,
            "crop_size": 12,
            "patch_size": 4,
            "frames_per_clip": 4,
            "pred_hidden_size": 24,
            "pred_num_attention_heads": 2,
            "pred_num_hidden_layers": 1,
            "in_chans": 3,
            "mlp_ratio": 2,
        },
        clip,
        beside=1,
    ),
    Family("radio", "RadioModel", {**IMAGE, "max_img_size": 12, "num_cls_tokens": 2, "num_registers": 1}, pixels),
    Family(
        "swin",
        "SwinModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": 4},
        pixels,
    ),
    Family(
        "segformer",
        "SegformerModel",
        {
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "num_attention_heads": [1, 2],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "image_size": 16,
            "mlp_ratios": [2, 2],
        },
        pixels,
    ),
    Family("wav2vec2", "Wav2Vec2Model", WAVES, waves, RIGHT),
    Family("hubert", "HubertModel", WAVES, waves, RIGHT),
    Family("unispeech", "UniSpeechModel", WAVES, waves, RIGHT),
    Family("unispeech-sat", "UniSpeechSatModel", WAVES, waves, RIGHT),
    Family("data2vec audio", "Data2VecAudioModel", WAVES, waves, RIGHT),
    Family("sew", "SEWModel", {**WAVES, "squeeze_factor": 2}, waves, RIGHT),
]
MERGED = {**WIDE, **NEAR, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
SEEING = {"text_config": MERGED, "vision_config": {**IMAGE, "model_type": "siglip_vision_model"}, "image_token_id": 99}
OTHERS = [  # recorded, but what they hand out is not their map
    Family("wavlm", "WavLMModel", WAVES, waves),  # the mean over heads
    Family("t5gemma2", "T5Gemma2Model", {**ENDS, "encoder": SEEING, "decoder": MERGED}, pairs, ANY),  # its halves
    text("diffllama", "DiffLlamaModel", LLAMA),  # one map; its kernel is called for each half of the values
]
FAMILIES = DECODERS + ENCODERS + PAIRS + SENSES


def find_family(name: str) -> Family:
    """Return the family of a name."""
    return next(family for family in FAMILIES + OTHERS if family.name == name)
