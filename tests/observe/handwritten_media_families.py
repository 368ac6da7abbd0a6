"""Families of models of pictures, sound, boxes and tables whose attention is written out by hand."""

from typing import Any

import torch
from torch import Tensor

from observe.families import HEADS, IMAGE, LAYERS, LLAMA, SIZES, TEXT, WAVES, WIDTH
from observe.family import RIGHT, WORDS, B, Family, T, film, pixels, tokens, waves

DETECTOR = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 12, 12], "depths": [1, 1, 1, 1]}
DEEPEST = {**RESNET, "out_features": ["stage4"]}
LAYERED = {"encoder_layers": 2, "decoder_layers": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
WRITTEN = {**LAYERED, "encoder_attention_heads": 3, "decoder_attention_heads": 4, "encoder_ffn_dim": 30, "decoder_ffn_dim": 30}
PYRAMID = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4], "num_encoder_blocks": 4}
REDUCED = {"image_size": 32, "mlp_ratios": [2, 2, 2, 2], "strides": [4, 2, 2, 2]}
WINDOWS = {"image_size": 16, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3], "window_size": 4}
PLAIN = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "patch_size": 4}
SAM = {
    **PLAIN,
    "image_size": 32,
    "output_channels": 16,
    "mlp_dim": 30,
    "window_size": 3,
    "global_attn_indexes": [1],
    "use_rel_pos": True,
}
VOICE = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 36,
    "projection_dim": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def squares(size: int, channels: int = 3) -> Any:
    """Pictures of this size."""
    return lambda config, side="none": {"pixel_values": torch.randn(B, channels, size, size)}


def draw_small_pictures_and_words(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures of 12 x 12 pixels, and words about them."""
    return {"pixel_values": torch.randn(B, 3, 12, 12), **tokens(config, side)}


def draw_words_and_boxes(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Words, and where each of them stands on a page."""
    return {**tokens(config, side), "bbox": torch.rand(B, T, 8)}


def draw_words_and_picture_features(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Words, and features of a picture that are further tokens."""
    given = tokens(config, side)
    masks = {"visual_attention_mask": torch.ones(B, 5)} if "attention_mask" in given else {}
    return {**given, "visual_embeds": torch.randn(B, 5, 20), **masks}


def objects(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Words, and features and places of objects in a picture."""
    return {**tokens(config, side), "visual_feats": torch.randn(B, 7, 20), "visual_pos": torch.rand(B, 7, 4)}


def entities(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Words, and entities that some of them name."""
    places = torch.tensor([[0, 1, -1], [2, -1, -1], [5, 6, 7], [3, -1, -1]]).expand(B, -1, -1)
    return {**tokens(config, side), "entity_ids": torch.randint(1, 10, (B, 4)), "entity_position_ids": places}


def draw_pictures_and_prompts(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, and an example of what to do with them."""
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: torch.randn(B, 3, 16, 16) for name in names}


def draw_spectra_and_voices(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Words, and the spectrum and the voice of what was said so far."""
    return {**tokens(config, side), "decoder_input_values": torch.randn(B, 6, 8), "speaker_embeddings": torch.randn(B, 6)}


def points(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pairs of pictures whose points are matched."""
    return {"pixel_values": torch.randn(2, 2, 1, 48, 64)}


def draw_pictures_and_classes(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, the names of classes to find in each, and a task in words."""
    ids = {"classes_input_ids": torch.randint(3, WORDS, (4, 7)), "tasks_input_ids": torch.randint(3, WORDS, (2, 7))}
    masks = {name.replace("input_ids", "attention_mask"): torch.ones_like(x) for name, x in ids.items()}
    return {"pixel_values": torch.randn(2, 3, 64, 64), **ids, **masks, "classes_structure": torch.tensor([2, 2])}


def draw_pictures_and_tasks(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, and in words what to do with them and what is in them."""
    texts = torch.randint(1, WORDS, (B, config.num_queries - config.text_encoder_n_ctx, config.text_encoder_context_length))
    return {
        "pixel_values": torch.randn(B, 3, 64, 64),
        "task_inputs": torch.rand(B, config.task_seq_len),
        "text_inputs": texts,
    }


MEDIA = [
    Family(
        "blip",
        "BlipModel",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 19},
        draw_small_pictures_and_words,
        RIGHT,
    ),
    Family("bros", "BrosModel", {**TEXT, "hidden_size": 64, "dim_bbox": 8}, draw_words_and_boxes, RIGHT),
    Family("visual_bert", "VisualBertModel", {**TEXT, "visual_embedding_dim": 20}, draw_words_and_picture_features, RIGHT),
    Family("vilt", "ViltModel", {**TEXT, "image_size": 12, "patch_size": 4}, draw_small_pictures_and_words, RIGHT),
    Family("luke", "LukeModel", {**TEXT, "entity_vocab_size": 10, "entity_emb_size": 6}, entities, RIGHT),
    Family(
        "lxmert", "LxmertModel", {**TEXT, "visual_feat_dim": 20, "l_layers": 2, "x_layers": 2, "r_layers": 2}, objects, RIGHT
    ),
    Family(
        "cvt",
        "CvtModel",
        {
            "patch_sizes": [3, 3, 3],
            "patch_stride": [2, 2, 2],
            "patch_padding": [1, 1, 1],
            "embed_dim": [12, 12, 24],
            "num_heads": [1, 2, 3],
            "depth": [1, 2, 3],
        },
        squares(32),
    ),
    Family("donut", "DonutSwinModel", {**WINDOWS, "patch_size": 2}, pixels),
    Family("swin2sr", "Swin2SRModel", {**WINDOWS, "patch_size": 1}, squares(16)),
    Family("glpn", "GLPNModel", {**PYRAMID, "sr_ratios": [4, 2, 1, 1], "decoder_hidden_size": 8}, squares(32)),
    Family(
        "pvt",
        "PvtModel",
        {**PYRAMID, **REDUCED, "sequence_reduction_ratios": [4, 2, 1, 1], "patch_sizes": [4, 2, 2, 2]},
        squares(32),
    ),
    Family("pvt_v2", "PvtV2Model", {**PYRAMID, **REDUCED, "sr_ratios": [4, 2, 1, 1], "patch_sizes": [4, 3, 3, 3]}, squares(32)),
    Family(
        "groupvit",
        "GroupViTVisionModel",
        {
            **PLAIN,
            "depths": [1, 1, 1],
            "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 2],
            "intermediate_size": 36,
            "image_size": 32,
            "patch_size": 8,
        },
        squares(32),
    ),
    Family(
        "hiera",
        "HieraModel",
        {"embed_dim": 12, "image_size": [64, 64], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "mlp_ratio": 2.0},
        squares(64),
    ),
    Family(
        "levit",
        "LevitModel",
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [1, 2, 3],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        squares(64),
    ),
    Family(
        "mgp_str",
        "MgpstrModel",
        {**PLAIN, "image_size": [16, 32], "max_token_length": 7, "mlp_ratio": 2.0},
        lambda config, side="none": {"pixel_values": torch.randn(B, 3, 16, 32)},
    ),
    Family(
        "mobilevit",
        "MobileViTModel",
        {
            "image_size": 32,
            "hidden_sizes": [12, 16, 20],
            "neck_hidden_sizes": [8, 8, 12, 12, 16, 20, 24],
            "num_attention_heads": 4,
        },
        squares(64),
    ),
    Family(
        "vitdet",
        "VitDetModel",
        {
            **PLAIN,
            "image_size": 32,
            "pretrain_image_size": 32,
            "window_block_indices": [1],
            "window_size": 3,
            "use_relative_position_embeddings": True,
        },
        squares(32),
    ),
    Family("timesformer", "TimesformerModel", {**SIZES, "image_size": 12, "patch_size": 4, "num_frames": 3}, film),
    Family(
        "seggpt",
        "SegGptModel",
        {
            **PLAIN,
            "image_size": [32, 16],
            "pretrain_image_size": 16,
            "merge_index": 0,
            "intermediate_hidden_state_indices": [0, 1],
            "mlp_dim": 36,
            "decoder_hidden_size": 8,
        },
        draw_pictures_and_prompts,
    ),
    Family(
        "got_ocr2",
        "GotOcr2Model",
        {"vision_config": SAM, "text_config": {**LLAMA, "model_type": "qwen2"}, "image_token_id": 5},
        lambda config, side="none": {
            "pixel_values": torch.randn(B, 3, 32, 32),
            "input_ids": torch.cat([torch.full((B, 4), 5), torch.randint(6, WORDS, (B, T))], 1),
        },
    ),
    Family(
        "perceiver",
        "PerceiverModel",
        {
            "num_latents": 7,
            "d_latents": 24,
            "d_model": 20,
            "num_blocks": 2,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 3,
            "num_cross_attention_heads": 2,
        },
        lambda config, side="none": {"inputs": torch.randn(B, T, 20)},
    ),
    Family(
        "table_transformer",
        "TableTransformerModel",
        {**DETECTOR, **WRITTEN, "backbone_config": DEEPEST, "d_model": 24, "num_queries": 7},
        squares(64),
    ),
    Family(
        "sew_d", "SEWDModel", {**WAVES, "squeeze_factor": 2, "max_position_embeddings": 64, "position_buckets": 8}, waves, RIGHT
    ),
    Family(
        "fastspeech2_conformer",
        "FastSpeech2ConformerModel",
        {
            "hidden_size": 24,
            "vocab_size": 38,
            "num_mel_bins": 8,
            "encoder_num_attention_heads": 3,
            "encoder_layers": 2,
            "encoder_linear_units": 36,
            "decoder_layers": 2,
            "decoder_num_attention_heads": 2,
            "decoder_linear_units": 36,
        },
        lambda config, side="none": {"input_ids": torch.randint(1, 38, (1, T))},
    ),
    Family(
        "speecht5",
        "SpeechT5ForTextToSpeech",
        {
            **WRITTEN,
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "num_mel_bins": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speaker_embedding_dim": 6,
            "reduction_factor": 1,
        },
        draw_spectra_and_voices,
        RIGHT,
    ),
    Family(
        "superglue",
        "SuperGlueForKeypointMatching",
        {
            "keypoint_detector_config": {
                "model_type": "superpoint",
                "encoder_hidden_sizes": [8, 8, 16, 16],
                "decoder_hidden_size": 16,
                "descriptor_decoder_dim": 24,
            },
            "hidden_size": 24,
            "keypoint_encoder_sizes": [8, 16],
            "gnn_layers_types": ["self", "cross"],
        },
        points,
    ),
    Family(
        "vits",
        "VitsModel",
        {
            "vocab_size": 38,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 36,
            "flow_size": 16,
            "spectrogram_bins": 17,
            "upsample_initial_channel": 16,
            "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3]],
            "prior_encoder_num_flows": 2,
        },
        lambda config, side="none": {"input_ids": torch.randint(3, 38, (2, T))},
    ),
    Family(
        "tvp",
        "TvpModel",
        {
            **TEXT,
            **DETECTOR,
            "backbone_config": DEEPEST,
            "num_frames": 2,
            "max_grid_col_position_embeddings": 9,
            "max_grid_row_position_embeddings": 9,
            "max_img_size": 64,
            "visual_prompt_size": 4,
        },
        lambda config, side="none": {
            "input_ids": torch.randint(3, WORDS, (1, T)),
            "attention_mask": torch.ones(1, T, dtype=torch.long),
            "pixel_values": torch.randn(1, 2, 3, 64, 64),
        },
    ),
    Family(
        "flava",
        "FlavaModel",
        {
            "image_config": {**SIZES, "image_size": 12, "patch_size": 4, "vocab_size": 20},
            "text_config": TEXT,
            "multimodal_config": SIZES,
            "hidden_size": WIDTH,
            "projection_dim": 19,
        },
        draw_small_pictures_and_words,
        RIGHT,
    ),
    *(
        Family(
            name,
            model,
            {
                **DETECTOR,
                **WRITTEN,
                "backbone_config": {**RESNET, "out_features": ["stage2", "stage3", "stage4"]},
                "text_config": {**TEXT, "model_type": "bert"},
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 32,
                "d_model": 32,
                "num_queries": 7,
                "num_feature_levels": 3,
                "encoder_n_points": 2,
                "decoder_n_points": 2,
                "max_text_len": T,
            },
            lambda config, side="none": {"pixel_values": torch.randn(B, 3, 64, 64), **tokens(config)},
        )
        for name, model in (("grounding_dino", "GroundingDinoModel"), ("mm_grounding_dino", "MMGroundingDinoModel"))
    ),
    Family(
        "wavtokenizer",
        "WavTokenizerModel",
        {
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "hidden_size": 12,
            "codebook_size": 16,
            "codebook_dim": 12,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 24,
            "decoder_num_layers": 1,
            "num_lstm_layers": 1,
        },
        lambda config, side="none": {"input_values": torch.randn(2, 1, 160)},
    ),
    Family(
        "slanet",
        "SLANetForTableRecognition",
        {"hidden_size": 24, "max_text_length": 4, "out_channels": 7, "post_conv_out_channels": 12},
        squares(64),
    ),
    Family(
        "slanext",
        "SLANeXtForTableRecognition",
        {"vision_config": SAM, "post_conv_in_channels": 16, "out_channels": 7, "hidden_size": 24, "max_text_length": 4},
        squares(32),
    ),
    Family(
        "clvp",
        "ClvpModelForConditionalGeneration",
        {
            "text_config": VOICE,
            "speech_config": VOICE,
            "decoder_config": {
                **VOICE,
                "max_position_embeddings": 64,
                "max_text_tokens": 64,
                "num_mel_attn_blocks": 2,
                "feature_size": 8,
                "decoder_fixing_codes": [5, 6, 7, 8],
            },
            "projection_dim": 19,
        },
        lambda config, side="none": {**tokens(config), "input_features": torch.randn(B, 8, 20)},
    ),
    Family(
        "zoedepth",
        "ZoeDepthForDepthEstimation",
        {
            **DETECTOR,
            "backbone_config": {
                **PLAIN,
                "model_type": "beit",
                "num_hidden_layers": 4,
                "image_size": 32,
                "patch_size": 8,
                "intermediate_size": 30,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
                "reshape_hidden_states": False,
            },
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "bottleneck_features": 8,
            "num_attractors": [4, 2, 2, 1],
            "bin_embedding_dim": 8,
            "num_relative_features": 8,
            "num_patch_transformer_layers": 4,
            "patch_transformer_hidden_size": 128,
            "patch_transformer_num_attention_heads": 4,
            "patch_transformer_intermediate_size": 16,
            "bin_configurations": [
                {"n_bins": 4, "min_depth": 1e-3, "max_depth": depth, "name": name}
                for name, depth in (("NYU", 10.0), ("KITTI", 80.0))
            ],
        },
        squares(32),
    ),
    Family(
        "omdet_turbo",
        "OmDetTurboForObjectDetection",
        {
            **DETECTOR,
            "backbone_config": {**RESNET, "out_features": ["stage2", "stage3", "stage4"]},
            "text_config": {
                **VOICE,
                "model_type": "clip_text_model",
                "hidden_size": 24,
                "max_position_embeddings": 32,
                "projection_dim": 24,
            },
            "apply_layernorm_after_vision_backbone": False,
            "encoder_in_channels": [8, 12, 12],
            "encoder_hidden_dim": 32,
            "decoder_hidden_dim": 32,
            "d_model": 32,
            "vision_features_channels": [32, 32, 32],
            "class_embed_dim": 24,
            "task_encoder_hidden_dim": 24,
            "text_projection_in_dim": 24,
            "text_projection_out_dim": 24,
            "encoder_attention_heads": 4,
            "decoder_num_heads": 4,
            "decoder_num_layers": 2,
            "num_queries": 5,
            "image_size": 64,
        },
        draw_pictures_and_classes,
    ),
    Family(
        "oneformer",
        "OneFormerModel",
        {
            "backbone_config": {
                **WINDOWS,
                "model_type": "swin",
                "image_size": 64,
                "patch_size": 2,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 2, 2],
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "num_queries": 7,
            "hidden_dim": 64,
            "conv_dim": 64,
            "mask_dim": 64,
            "num_attention_heads": 4,
            "dim_feedforward": 30,
            "encoder_feedforward_dim": 30,
            "encoder_layers": 1,
            "decoder_layers": 3,
            "query_dec_layers": 1,
            "task_seq_len": 9,
            "text_encoder_width": 64,
            "text_encoder_context_length": 9,
            "text_encoder_num_layers": 1,
            "text_encoder_vocab_size": WORDS,
            "text_encoder_n_ctx": 2,
            "is_training": True,
        },
        draw_pictures_and_tasks,
    ),
    Family(
        "dab_detr",
        "DabDetrModel",
        {**DETECTOR, **WRITTEN, "backbone_config": DEEPEST, "hidden_size": 24, "num_queries": 7},
        squares(64),
    ),
]

GRANITE_SPEECH = {
    "input_dim": 8,
    "hidden_dim": 24,
    "num_layers": 2,
    "feedforward_mult": 2,
    "num_heads": 4,
    "dim_head": 6,
    "output_dim": 10,
    "context_size": 5,
    "max_pos_emb": 8,
    "conv_kernel_size": 3,
}


def draw_spectra_and_words(config: Any, side: str = "none") -> dict[str, Tensor]:
    """The spectrum of sound, and words after the tokens that stand for it."""
    ids = torch.cat([torch.full((2, 2), config.audio_token_index), torch.randint(3, 90, (2, 9))], 1)
    masks = {"input_features_mask": torch.ones(2, 2, dtype=torch.bool)}
    return {"input_ids": ids, "input_features": torch.randn(2, 10, 8), **masks}


KERNELS = [  # that call a kernel of torch themselves
    Family(
        name,
        model,
        {
            "encoder_config": {**GRANITE_SPEECH, "model_type": f"{name}_encoder"},
            "text_config": {**LLAMA, "model_type": "granite"},
            "projector_config": {**TEXT, "model_type": "blip_2_qformer", "num_hidden_layers": 1, "encoder_hidden_size": 24},
            "audio_token_index": 99,
            "window_size": 5,
            "downsample_rate": 5,
            "has_lora_adapter": False,
        },
        draw_spectra_and_words,
    )
    for name, model in (
        ("granite_speech", "GraniteSpeechForConditionalGeneration"),
        ("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration"),
    )
]
