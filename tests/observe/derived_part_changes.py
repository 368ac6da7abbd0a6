"""The same as in `derived_changes` of families that are made of parts: towers, backbones, encoders with decoders."""

from typing import Any

VIT = {
    "model_type": "vit",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "projection_dim": 0,
}
WRITER = {**BERT, "is_decoder": True, "add_cross_attention": True}
BART = {
    "model_type": "bart",
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 101,
    "max_position_embeddings": 128,
}
LISTENER = {
    "model_type": "wav2vec2",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16],
    "conv_kernel": [8, 3],
    "conv_stride": [4, 2],
    "num_conv_pos_embeddings": 5,
    "num_conv_pos_embedding_groups": 2,
}
SWIN = {
    "model_type": "swin",
    "image_size": 64,
    "embed_dim": 12,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
LAST = {"out_features": ["stage1", "stage2"], "out_indices": [1, 2]}
HIERA = {
    "hidden_size": 12,
    "num_attention_heads": 1,
    "image_size": [64, 64],
    "window_positional_embedding_background_size": [4, 4],
    "blocks_per_stage": [1, 2, 2, 1],
    "embed_dim_per_stage": [12, 24, 36, 48],
    "num_attention_heads_per_stage": [1, 2, 2, 4],
    "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [4],
}
SEEN = {"fpn_hidden_size": 48, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
SAM3 = {
    **SEEN,
    "backbone_config": {
        "image_size": 32,
        "patch_size": 8,
        "window_size": 2,
        "global_attn_indexes": [1],
        "pretrain_image_size": 32,
    },
}
PROMPTS = {"image_size": 64, "patch_size": 16}
MASKS = {"iou_head_hidden_dim": 48}
VIBE = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
DAC = {
    "encoder_hidden_size": 8,
    "downsampling_ratios": [4, 2],
    "upsampling_ratios": [2, 4],
    "decoder_hidden_size": 32,
    "n_codebooks": 2,
    "codebook_size": 64,
    "codebook_dim": 8,
    "hidden_size": 32,
}
WAV_BERT = {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 5}
CODEC = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "encoder_hidden_size": 8,
    "downsampling_ratios": [2, 2],
    "quantization_dim": 128,
    "semantic_model_config": {**WAV_BERT, "hidden_size": 64},
}
ASSISTANT = {
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 101,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"01": {"head_dim": 24}},
    },
    "backbone_hidden_size": 48,
}

MEMORY = {  # its keys are always 64 wide, and parts of what is wider
    "memory_attention_hidden_size": 128,
    "memory_attention_num_layers": 2,
    "memory_attention_feed_forward_hidden_size": 48,
    "memory_attention_rope_feat_sizes": [4, 4],
    "memory_encoder_hidden_size": 128,
    "memory_fuser_embed_dim": 128,
    "memory_fuser_intermediate_dim": 48,
    "mask_downsampler_embed_dim": 128,
    "mask_decoder_config": {"hidden_size": 128, "iou_head_hidden_dim": 48},
}
SAM2 = {
    "vision_config": {**SEEN, "backbone_config": HIERA, "backbone_channel_list": [48, 36, 24, 12]},
    "prompt_encoder_config": PROMPTS,
    "mask_decoder_config": MASKS,
}
SAM2_VIDEO = {
    **MEMORY,
    "image_size": 64,
    "vision_config": {**SAM2["vision_config"], "fpn_hidden_size": 128},
    "prompt_encoder_config": {**PROMPTS, "hidden_size": 128},
}
SAM3_TRACKER = {
    "vision_config": SAM3,
    "prompt_encoder_config": {"image_size": 32, "patch_size": 8},
    "mask_decoder_config": MASKS,
}
CODES = {f"IMGIMG{chr(65 + code)}Z": 90 + code for code in range(8)}
NEEDS = {  # packages that a model needs beside transformers
    "EomtForUniversalSegmentation": "scipy",
    "EomtDinov3ForUniversalSegmentation": "scipy",
    "VideomtForUniversalSegmentation": "scipy",
    "TimmWrapperModel": "timm",
    "TimmBackbone": "timm",
    "FastVlmModel": "timm",
    "PerceptionLMModel": "timm",
    "PeVideoModel": "timm",
    "PeAudioVideoModel": "timm",
}
TIMM = {"model_type": "timm_wrapper", "architecture": "test_vit"}
FILM = {"vision_config": TIMM, "num_key_value_heads": 4}
SOUND = {"dac_config": DAC, "num_key_value_heads": 4}
PART_CHANGES: dict[str, dict[str, Any]] = {
    "CHMv2ForDepthEstimation": {
        "backbone_config": {**LAST, "return_class_token": True, "reshape_hidden_states": True},
        "reassemble_factors": [2, 1],
        "post_process_channels": [8, 8],
        "fusion_hidden_size": 8,
        "head_hidden_size": 8,
        "number_output_channels": 8,
    },
    "EncoderDecoderModel": {"encoder": BERT, "decoder": WRITER},
    "VisionEncoderDecoderModel": {"encoder": VIT, "decoder": WRITER},
    "SpeechEncoderDecoderModel": {"encoder": LISTENER, "decoder": WRITER},
    "VisionTextDualEncoderModel": {},
    "RagModel": {"question_encoder": {**BERT, "model_type": "dpr"}, "generator": BART, "n_docs": 3},
    "EfficientLoFTRModel": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [8, 8, 12, 48],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_attention_layers": 2,
        "q_aggregation_kernel_size": 2,
        "kv_aggregation_kernel_size": 2,
        "q_aggregation_stride": 2,
        "kv_aggregation_stride": 2,
    },
    "EomtForUniversalSegmentation": {"num_queries": 7, "num_blocks": 1, "num_upscale_blocks": 1},
    "EomtDinov3ForUniversalSegmentation": {"num_queries": 7, "num_blocks": 1, "num_upscale_blocks": 1},
    "VideomtForUniversalSegmentation": {"num_queries": 7, "num_blocks": 1, "num_upscale_blocks": 1},
    "Florence2Model": {
        "vision_config": {
            "depths": [1, 1, 1, 1],
            "embed_dim": [8, 16, 24, 48],
            "num_heads": [1, 2, 2, 4],
            "num_groups": [1, 2, 2, 4],
            "window_size": 4,
        }
    },
    "Sam2Model": SAM2,
    "Sam2VideoModel": SAM2_VIDEO,
    "EdgeTamVideoModel": {
        **SAM2_VIDEO,
        "memory_attention_rope_k_sizes": [2, 2],
        "perceiver_resampler_num_latents": 4,
        "perceiver_resampler_num_latents_2d": 4,
        "perceiver_resampler_attention_head_dim": 16,
    },
    "ChameleonModel": {
        "vocabulary_map": {"<image>": 99, **CODES},
        "vq_config": {
            "embed_dim": 16,
            "latent_channels": 16,
            "num_embeddings": 8,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
        },
    },
    "Sam3LiteTextModel": {"vision_config": SAM3, "detr_decoder_config": {"num_queries": 7}},
    "Sam3TrackerModel": SAM3_TRACKER,
    "Sam3TrackerVideoModel": {
        **MEMORY,
        "vision_config": {**SAM3, "fpn_hidden_size": 128},
        "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "hidden_size": 128},
    },
    "ShieldGemma2ForImageClassification": {"yes_token_index": 5, "no_token_index": 6, "mm_tokens_per_image": 4},
    "Speech2TextModel": {"conv_channels": 16, "input_feat_per_channel": 8},
    "TimesFmModel": {"patch_length": 8, "context_length": 64, "horizon_length": 8},
    "TimesFm2_5Model": {"patch_length": 8, "context_length": 64, "horizon_length": 8, "num_key_value_heads": 4},
    "Tipsv2DptForDepthEstimation": {
        "backbone_config": {**LAST, "reshape_hidden_states": False},
        "reassemble_factors": [2, 1],
        "neck_hidden_sizes": [8, 8],
        "fusion_hidden_size": 8,
    },
    "UdopModel": {},
    "UperNetForSemanticSegmentation": {"backbone_config": SWIN, "auxiliary_channels": 8},
    "Mask2FormerModel": {
        "backbone_config": SWIN,
        "hidden_dim": 64,
        "feature_size": 64,
        "mask_feature_size": 64,
        "num_queries": 7,
        "encoder_feedforward_dim": 64,
    },
    "VibeVoiceModel": {"audio_config": VIBE, "semantic_model_config": VIBE},
    "VibeVoiceAsrModel": {"acoustic_tokenizer_encoder_config": VIBE, "semantic_tokenizer_encoder_config": VIBE},
    "VitMatteForImageMatting": {
        "backbone_config": {
            "num_channels": 4,
            "image_size": 64,
            "patch_size": 16,
            "out_features": ["stage2"],
            "window_block_indices": [0],
            "window_size": 2,
            "use_relative_position_embeddings": True,
        },
        "convstream_hidden_sizes": [8, 8, 8],
        "fusion_hidden_sizes": [8, 8, 8, 8],
    },
    "VitPoseForPoseEstimation": {
        "backbone_config": {"image_size": [32, 24], "patch_size": [8, 8], "num_experts": 1, "out_features": ["stage2"]}
    },
    "VitPoseBackbone": {"image_size": [32, 24], "patch_size": [8, 8], "num_experts": 2, "part_features": 16},
    "VoxtralRealtimeModel": {"audio_config": {"num_mel_bins": 8}},
    "Wav2Vec2BertModel": WAV_BERT,
    "XcodecModel": {"acoustic_model_config": DAC, "codebook_size": 64, "codebook_dim": 80, "target_bandwidths": [12.0, 24.0]},
    "Xcodec2Model": CODEC,
    "NeuCodecModel": CODEC,
    "ZayaModel": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid"]},
    "PeAudioModel": {"audio_config": SOUND},
    "PeVideoModel": {"video_config": FILM},
    "PeAudioVideoModel": {"audio_video_config": {"audio_config": SOUND, "video_config": FILM, "num_key_value_heads": 4}},
    "TimmWrapperModel": {"architecture": "test_vit"},
    "TimmBackbone": {"backbone": "test_vit", "out_indices": [-1]},
    "FastVlmModel": {"vision_config": {**TIMM, "hidden_size": 64}},
    "PerceptionLMModel": {"vision_config": {**TIMM, "model_args": {"embed_dim": 64}}},
    "NemotronH_Omni_Reasoning_V3": {
        "vision_config": {"video_temporal_patch_size": 2, "max_img_size": 64},
        "vision_hidden_size": 48,
        "projector_hidden_size": 64,
        "text_config": {"ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8},
    },
    "Gemma4AssistantForCausalLM": ASSISTANT,
    "Gemma4UnifiedAssistantForCausalLM": {
        **ASSISTANT,
        "text_config": {**ASSISTANT["text_config"], "model_type": "gemma4_unified_text"},
    },
}
