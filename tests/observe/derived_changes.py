"""Families of transformers whose small config needs a few changes more than `derived_families` makes to the defaults."""

from typing import Any

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
TEXT_MROPE = {"text_config": MROPE}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {"01": {"head_dim": 24}}}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {"rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE}}
NARROW = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101}
EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
MIMI = {
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 16,
    "num_quantizers": 4,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 48,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [2, 2, 2]},
}
SERIES = {"prediction_length": 11, "context_length": 23, "lags_sequence": [1, 2, 3], "num_time_features": 2}
HGNET = {
    "out_features": ["stage2", "stage3", "stage4"],
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 8, 8],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 8, 8, 8],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
}
DETECTOR = {
    "encoder_hidden_dim": 48,
    "encoder_in_channels": [8, 8, 8],
    "decoder_in_channels": [48, 48, 48],
    "encoder_layers": 1,
    "num_queries": 7,
    "num_denoising": 0,
}
RESNET = {
    "out_features": ["stage2", "stage3", "stage4"],
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
DEPTH = {
    "backbone_config": {"out_features": ["stage1", "stage2"], "out_indices": [1, 2], "reshape_hidden_states": False},
    "reassemble_hidden_size": 48,
    "reassemble_factors": [2, 1],
    "neck_hidden_sizes": [8, 8],
    "fusion_hidden_size": 8,
    "head_hidden_size": 8,
}
CHARACTERS = {"num_codebooks": 4, "pad_token_id": 101}

CHANGES: dict[str, dict[str, Any]] = {
    "ASTModel": {"max_length": 40, "num_mel_bins": 20, "patch_size": 8, "time_stride": 5, "frequency_stride": 5},
    "BltModel": {
        "encoder_hash_byte_group_vocab": 50,
        "use_cache": False,  # its cache wants a number of layers, which its config lacks
        "encoder_config": {"hidden_size_global": 48},
        "decoder_config": {"hidden_size_global": 48},
    },
    "CohereAsrModel": {"encoder_config": {"num_mel_bins": 80, "subsampling_conv_channels": 16, "num_key_value_heads": 4}},
    "CohereCompassTextModel": {**ROPES, "layer_types": ["sliding_attention", "full_attention"]},
    "ColModernVBertForRetrieval": {},
    "ColPaliForRetrieval": {},
    "ColQwen2ForRetrieval": {"vlm_config": TEXT_MROPE},
    "DbrxModel": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 64},
    },
    "DiffusionGemmaModel": {"text_config": {**LAYERS, **EXPERTS}, "canvas_length": 11},
    "DoryModel": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Ernie4_5_VLMoeTextModel": {**MROPE, "moe_intermediate_size": [16, 16], "mlp_layer_types": ["dense", "sparse"]},
    "EsmcModel": {"num_key_value_heads": 4},
    "FunAsrNanoEncoder": {"num_mel_bins": 8, "num_timestamp_prediction_layers": 1},
    "Gemma3nTextModel": {
        **NARROW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
    },
    "Gemma4TextModel": {**LAYERS, **NARROW},
    "Gemma4AudioModel": {"subsampling_conv_channels": [8, 8]},
    "Glm4vModel": TEXT_MROPE,
    "Glm46VModel": TEXT_MROPE,
    "Glm4vMoeModel": {"text_config": {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}},
    "GlmImageModel": TEXT_MROPE,
    "GlmOcrModel": TEXT_MROPE,
    "Glm5NextTextModel": {
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "GradiumPhononTTSModel": {"flow_head_config": {"condition_dim": 48}, "num_key_value_heads": 4},
    "GraniteSpeech5Encoder": {"num_key_value_heads": 4, "context_size": 8},
    "HunYuanMoEV1Model": {"head_dim": 12},
    "HunYuanVLModel": {
        "text_config": {"head_dim": 12, **MROPE},
        "vision_config": {"img_max_token_num": 64, "max_image_size": 64},
    },
    "Glm4vVisionModel": {},
    "Glm4vMoeVisionModel": {},
    "Glm5NextVisionModel": {},
    "GlmOcrVisionModel": {},
    "GlmImageVisionModel": {},
    "CohereCompassVisionModel": {},
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": {},
    "Qwen2_5OmniVisionEncoder": {},
    "HunYuanVLVisionTransformer": {"img_max_token_num": 64, "max_image_size": 64},
    "HYV4VLVisionModel": {"max_image_size": 64},
    "HYV4VLTextModel": {
        "qk_rope_head_dim": 12,
        "index_head_dim": 16,
        "head_dim": 12,
        "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "IdeficsModel": {"use_resampler": False},
    "InformerModel": {**SERIES, "sampling_factor": 1},
    "TimeSeriesTransformerModel": SERIES,
    "JevForDecision": {"text_config": DELTA},
    "KyutaiSpeechToTextModel": {"num_codebooks": 4, "audio_pad_token_id": 505, "codec_config": MIMI},
    "LayoutLMv3Model": {"coordinate_size": 8, "shape_size": 8, "input_size": 32},
    "LongT5Model": {"local_radius": 3},
    "PegasusXModel": {"block_size": 4, "num_global_tokens": 3},
    "Lfm3VlModel": {
        "text_config": {"layer_types": ["conv", "full_attention"]},
        "vision_config": {"layer_types": ["conv", "full_attention"]},
        "projector_hidden_size": 64,
    },
    "LightGlueForKeypointMatching": {
        "descriptor_dim": 48,
        "num_key_value_heads": 4,
        "keypoint_detector_config": {
            "encoder_hidden_sizes": [8, 8, 8, 8],
            "decoder_hidden_size": 8,
            "descriptor_decoder_dim": 48,
            "keypoint_threshold": 0.0,
            "max_keypoints": 11,
        },
    },
    "LwDetrModel": {
        "backbone_config": {
            "image_size": 64,
            "num_hidden_layers": 4,
            "window_block_indices": [0, 2],
            "num_windows": 4,
            "out_features": ["stage2", "stage4"],
            "out_indices": [2, 4],
        },
        "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4,
        "num_queries": 7,
        "group_detr": 1,
        "projector_out_channels": 48,
        "projector_scale_factors": [1.0],
    },
    "MimiModel": MIMI,
    "MiniCPMOcrModel": {"text_config": DELTA},
    "MiniCPMV4_6Model": {"text_config": DELTA},
    "MiniCPMV4_7Model": {"text_config": DELTA},
    "Mistral4Model": {"head_dim": 12},
    "MoshiModel": {"num_codebooks": 4, "audio_encoder_config": MIMI, "depth_decoder_config": {"num_codebooks": 4}},
    "MuseGlimmerAssistantModel": {"target_layer_ids": [1, 3], "block_size": 7, "layer_types": ["full_attention"] * 2},
    "MusicgenModel": CHARACTERS,
    "MusicgenMelodyModel": CHARACTERS,
    "OmniASRCTCModel": {"audio_config": {"num_conv_pos_embeddings": 4}},
    "PaddleOCRVLModel": TEXT_MROPE,
    "PatchTSMixerModel": {"self_attn": True, "self_attn_heads": 4},
    "PatchTSTModel": {"patch_length": 4, "patch_stride": 4},
    "NeoMMEModel": {
        "embedding_rank": 8,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {},
    },
    "Nemotron3_5AsrForRNNT": {},
    "PI0ForConditionalGeneration": {"max_state_dim": 8, "max_action_dim": 8, "chunk_size": 5},
    "Pix2StructForConditionalGeneration": {"vision_config": {"seq_len": 16, "patch_embed_hidden_size": 48}},
    "PocketTTSModel": {"flow_head_config": {"condition_dim": 48}, "num_key_value_heads": 4},
    "PocketTTSAudioTokenizerModel": {"num_filters": 4, "upsampling_ratios": [4, 2], "upsample_groups": 48, "latent_stride": 2},
    "Pop2PianoForConditionalGeneration": {},
    "RTDetrModel": {**DETECTOR, "backbone_config": RESNET},
    "RTDetrV2Model": {**DETECTOR, "backbone_config": RESNET},
    "DFineModel": {**DETECTOR, "backbone_config": HGNET},
    "Deimv2Model": {**DETECTOR, "backbone_config": HGNET},
    "PPDocLayoutV2ForObjectDetection": {
        **DETECTOR,
        "backbone_config": HGNET,
        "reading_order_config": {"coordinate_size": 8, "shape_size": 8, "num_classes": 2},
        "class_thresholds": [0.0, 0.0],
        "class_order": [0, 1],
    },
    "PPDocLayoutV3Model": {
        **DETECTOR,
        "backbone_config": {**HGNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "mask_feature_channels": [8, 8],
        "x4_feat_dim": 8,
    },
    "PPDocLayoutV4Model": {**DETECTOR, "backbone_config": HGNET},
    "DeformableDetrModel": {
        "backbone_config": {"model_type": "resnet", **RESNET},
        "d_model": 64,
        "num_feature_levels": 3,
        "num_queries": 7,
    },
    "DepthAnythingForDepthEstimation": DEPTH,
    "PromptDepthAnythingForDepthEstimation": DEPTH,
    "DepthProModel": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [8, 8],
        "scaled_images_feature_dims": [8, 8, 8],
        "fusion_hidden_size": 8,
    },
    "PPOCRV5MobileRecForTextRecognition": {"head_out_channels": 7},
    "PPOCRV5ServerRecForTextRecognition": {"backbone_config": HGNET, "head_out_channels": 7},
    "PPOCRV6SmallRecForTextRecognition": {"head_out_channels": 7},
    "Qwen2_5OmniThinkerModel": TEXT_MROPE,
}


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with changes put into them, also into those of parts."""
    deeper = {name: merge(settings[name], value) for name, value in changes.items() if is_part(name, value, settings)}
    return {**settings, **changes, **deeper}


def is_part(name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Return whether a change is one to the settings of a part, and not a part of another kind."""
    is_dict = isinstance(value, dict) and isinstance(settings.get(name), dict)
    return name.endswith("_config") and is_dict and "model_type" not in value
