"""What the models of `derived_families` are fed whose inputs do not follow from the names of what they take."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

B, T, WORDS = 2, 13, 90


def draw_series(config: Any) -> dict[str, Tensor]:
    """Return time series that are known, and what is known of their future."""
    before, after = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": torch.randn(B, before),
        "past_time_features": torch.randn(B, before, 2),
        "past_observed_mask": torch.ones(B, before),
        "future_values": torch.randn(B, after),
        "future_time_features": torch.randn(B, after, 2),
    }


def draw_words(tokens: int = T) -> Tensor:
    """Return words."""
    return torch.randint(5, WORDS, (B, tokens))


def draw_boxes(tokens: int = T) -> Tensor:
    """Return the corners of the boxes in which words stand."""
    corners = torch.randint(0, 50, (B, tokens, 2))
    return torch.cat([corners, corners + torch.randint(1, 40, (B, tokens, 2))], -1)


def put_first(token: int, count: int) -> Tensor:
    """Return words after a token that stands for a part of a picture, which comes several times."""
    return torch.cat([torch.full((B, count), token), draw_words()], 1)


def draw_points(side: int) -> dict[str, Tensor]:
    """Return pictures, and two points in each of them."""
    points, labels = side * torch.rand(B, 1, 2, 2), torch.ones(B, 1, 2, dtype=torch.long)
    return {"pixel_values": torch.randn(B, 3, side, side), "input_points": points, "input_labels": labels}


def track(model: nn.Module) -> dict[str, Any]:
    """Return two pictures of a film, in the first of which the model has found an object, and the number of the second."""
    sessions = [kind for name, kind in vars(import_module(type(model).__module__)).items() if name.endswith("InferenceSession")]
    side = model.config.image_size
    film = torch.randn(2, 3, side, side)
    session = sessions[0](video=film, video_height=side, video_width=side, dtype=film.dtype)
    points = {"point_coords": side * torch.rand(1, 1, 2, 2), "point_labels": torch.ones(1, 1, 2, dtype=torch.int32)}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, points)
    session.obj_with_new_inputs = [1]
    model(session, frame_idx=0)
    return {"inference_session": session, "frame_idx": 1}


def draw_shared_keys(config: Any) -> dict[str, Any]:
    """Return a token, and the keys and values of the model that it is guessed for."""
    shared = {kind: torch.randn(2, B, 2, T, width) for kind, width in (("sliding_attention", 12), ("full_attention", 24))}
    inputs = torch.randn(B, 1, 2 * config.backbone_hidden_size)
    return {"inputs_embeds": inputs, "shared_kv_states": {kind: (k, v) for kind, (k, v) in shared.items()}}


def draw_squares(side: int) -> Callable[[Any], dict[str, Tensor]]:
    """Return what draws square pictures."""
    return lambda config: {"pixel_values": torch.randn(B, 3, side, side)}


def draw_patches(name: str) -> Callable[[Any], dict[str, Tensor]]:
    """Return what draws the patches of two pictures of unlike sizes, which a model takes by this name."""

    def draw(config: Any) -> dict[str, Tensor]:
        grid = torch.tensor([[1, 4, 2], [1, 2, 6]])
        channels = getattr(config, "in_channels", None) or config.num_channels
        width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
        return {name: torch.randn(int(grid.prod(1).sum()), width), "grid_thw": grid}

    return draw


def draw_spectrum(bands: int, frames: int = 60) -> Callable[[Any], dict[str, Tensor]]:
    """Return what draws the bands of a sound, frame by frame."""
    return lambda config: {"input_features": torch.randn(B, frames, bands)}


FEEDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ASTModel": lambda config: {"input_values": torch.randn(B, config.max_length, config.num_mel_bins)},
    "FunAsrNanoEncoder": lambda config: {
        "input_features": torch.randn(B, 11, config.num_mel_bins * config.num_stacked_frames),
        "input_features_mask": torch.ones(B, 11, dtype=torch.long),
    },
    "Gemma4AudioModel": draw_spectrum(8),
    "GraniteSpeech5Encoder": draw_spectrum(320, 32),
    "IdeficsModel": lambda config: {
        "input_ids": draw_words(),
        "pixel_values": torch.randn(B, 2, 3, 32, 32),
        "image_attention_mask": torch.ones(B, T, 2, dtype=torch.long),
    },
    "InformerModel": draw_series,
    "TimeSeriesTransformerModel": draw_series,
    "JevForDecision": lambda config: {
        "input_ids": draw_words()[:1],
        "marks": torch.tensor([[7, 13]]),
        "num_options": torch.tensor([[2, 3]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    },
    "KyutaiSpeechToTextModel": lambda config: {"input_ids": torch.randint(5, WORDS, (B, T, config.num_codebooks + 1))},
    "LayoutLMv3Model": lambda config: {
        "input_ids": draw_words(),
        "bbox": draw_boxes(),
        "pixel_values": torch.randn(B, 3, 32, 32),
    },
    "LightGlueForKeypointMatching": lambda config: {"pixel_values": torch.randn(B, 2, 3, 64, 64)},
    "MimiModel": lambda config: {"input_values": torch.randn(B, 1, 400)},
    "MuseGlimmerAssistantModel": lambda config: {
        "noise_embeds": torch.randn(B, config.block_size, 48),
        "context_hidden_states": torch.randn(B, T, 48 * len(config.target_layer_ids)),
    },
    "MusicgenModel": lambda config: {
        "input_ids": torch.randint(5, WORDS, (B * config.num_codebooks, T)),
        "encoder_hidden_states": torch.randn(B, 11, 48),
    },
    "MusicgenMelodyModel": lambda config: {
        "input_ids": torch.randint(5, WORDS, (B * config.num_codebooks, T)),
        "encoder_hidden_states": torch.randn(B, 11, 48),
    },
    "OmniASRCTCModel": lambda config: {"input_values": torch.randn(B, 1, 400)},
    "PatchTSMixerModel": lambda config: {"past_values": torch.randn(B, 32, config.num_input_channels)},
    "PI0ForConditionalGeneration": lambda config: {
        "state": torch.randn(B, config.max_state_dim),
        "noise": torch.randn(B, config.chunk_size, config.max_action_dim),
        "timestep": torch.rand(B),
        "input_ids": torch.cat([torch.full((B, 16), 99), draw_words()], 1),
        "pixel_values": torch.randn(B, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(B, 1, dtype=torch.bool),
    },
    "Pix2StructForConditionalGeneration": lambda config: {
        "flattened_patches": torch.cat([torch.randint(1, 9, (B, 11, 2)).float(), torch.randn(B, 11, 48)], -1),
        "decoder_input_ids": draw_words(7),
    },
    "PocketTTSAudioTokenizerModel": lambda config: {"input_values": torch.randn(B, 1, 400)},
    "Pop2PianoForConditionalGeneration": lambda config: {
        "input_features": torch.randn(B, 11, 48),
        "decoder_input_ids": draw_words(7),
    },
    "PromptDepthAnythingForDepthEstimation": lambda config: {
        "pixel_values": torch.randn(B, 3, 32, 32),
        "prompt_depth": torch.rand(B, 1, 32, 32),
    },
    "PatchTSTModel": lambda config: {"past_values": torch.randn(B, 32, config.num_input_channels)},
}
FEEDS |= {
    f"{name}RecForTextRecognition": lambda config: {"pixel_values": torch.randn(B, 3, 80, 256)}
    for name in ("PPOCRV5Mobile", "PPOCRV5Server", "PPOCRV6Small")
}
FEEDS |= {
    "ChameleonModel": lambda config: {"input_ids": put_first(99, 16), "pixel_values": torch.randn(B, 3, 32, 32)},
    "EncoderDecoderModel": lambda config: {"input_ids": draw_words(), "decoder_input_ids": draw_words(7)},
    "VisionEncoderDecoderModel": lambda config: {"pixel_values": torch.randn(B, 3, 32, 32), "decoder_input_ids": draw_words(7)},
    "SpeechEncoderDecoderModel": lambda config: {"inputs": torch.randn(B, 400), "decoder_input_ids": draw_words(7)},
    "VisionTextDualEncoderModel": lambda config: {"input_ids": draw_words(), "pixel_values": torch.randn(B, 3, 32, 32)},
    "RagModel": lambda config: {
        "input_ids": draw_words(),
        "context_input_ids": torch.randint(5, WORDS, (B * config.n_docs, T)),
        "context_attention_mask": torch.ones(B * config.n_docs, T, dtype=torch.long),
        "doc_scores": torch.randn(B, config.n_docs),
        "decoder_input_ids": draw_words(7),
    },
    "EfficientLoFTRModel": lambda config: {"pixel_values": torch.randn(B, 2, 3, 64, 64)},
    "VideomtForUniversalSegmentation": lambda config: {"pixel_values_videos": torch.randn(B, 3, 3, 32, 32)},
    "Florence2Model": lambda config: {
        "input_ids": put_first(99, 5),
        "pixel_values": torch.randn(B, 3, 64, 64),
        "decoder_input_ids": draw_words(7),
    },
    "Sam2Model": lambda config: draw_points(64),
    "PeVideoModel": lambda config: {"input_ids": draw_words(), "pixel_values_videos": torch.randn(B, 3, 3, 160, 160)},
    "PeAudioVideoModel": lambda config: {
        "input_ids": draw_words(),
        "pixel_values_videos": torch.randn(B, 3, 3, 160, 160),
        "input_values": torch.randn(B, 1, 400),
    },
    "Sam3TrackerModel": lambda config: draw_points(32),
    "Sam3LiteTextModel": lambda config: {"input_ids": draw_words(), "pixel_values": torch.randn(B, 3, 32, 32)},
    "ShieldGemma2ForImageClassification": lambda config: {
        "input_ids": put_first(99, 4),
        "pixel_values": torch.randn(B, 3, 32, 32),
        "token_type_ids": torch.zeros(B, T + 4, dtype=torch.long),
    },
    "Speech2TextModel": lambda config: {"input_features": torch.randn(B, 40, 8), "decoder_input_ids": draw_words(7)},
    "TimesFmModel": lambda config: {
        "past_values": torch.randn(B, 64),
        "past_values_padding": torch.zeros(B, 64, dtype=torch.long),
        "freq": torch.zeros(B, 1, dtype=torch.long),
    },
    "TimesFm2_5Model": lambda config: {"past_values": torch.randn(B, 64), "past_values_padding": torch.zeros(B, 64)},
    "UdopModel": lambda config: {
        "input_ids": draw_words(),
        "bbox": draw_boxes() / 100,
        "pixel_values": torch.randn(B, 3, 32, 32),
        "decoder_input_ids": draw_words(7),
    },
    "VitMatteForImageMatting": lambda config: {"pixel_values": torch.randn(B, 4, 64, 64)},
    "VitPoseForPoseEstimation": lambda config: {"pixel_values": torch.randn(B, 3, 32, 24)},
    "VitPoseBackbone": lambda config: {
        "pixel_values": torch.randn(B, 3, 32, 24),
        "dataset_index": torch.arange(B),
    },
    "VoxtralRealtimeModel": lambda config: {"input_ids": draw_words(), "input_features": torch.randn(B, 8, 8 * T)},
    "Wav2Vec2BertModel": lambda config: {"input_features": torch.randn(B, 40, 16)},
    "XcodecModel": lambda config: {"input_values": torch.randn(B, 1, 400)},
    "Xcodec2Model": lambda config: {"input_values": torch.randn(B, 1, 400), "input_features": torch.randn(B, 100, 16)},
    "NeuCodecModel": lambda config: {"input_values": torch.randn(B, 1, 400), "input_features": torch.randn(B, 100, 16)},
    "PeAudioModel": lambda config: {"input_ids": draw_words(), "input_values": torch.randn(B, 1, 400)},
    "Gemma4AssistantForCausalLM": lambda config: draw_shared_keys(config),
    "Gemma4UnifiedAssistantForCausalLM": lambda config: draw_shared_keys(config),
}

PACKED = {
    "Glm4vVisionModel": "hidden_states",
    "Glm4vMoeVisionModel": "hidden_states",
    "Glm5NextVisionModel": "hidden_states",
    "GlmOcrVisionModel": "hidden_states",
    "GlmImageVisionModel": "pixel_values",
    "CohereCompassVisionModel": "hidden_states",
    "Ernie4_5_VLMoeVisionTransformerPretrainedModel": "hidden_states",
    "Qwen2_5OmniVisionEncoder": "hidden_states",
    "HunYuanVLVisionTransformer": "pixel_values",
    "HYV4VLVisionModel": "pixel_values",
}
FEEDS |= {name: draw_patches(first) for name, first in PACKED.items()}
SQUARES = {
    "RTDetrModel": 64,
    "RTDetrV2Model": 64,
    "DFineModel": 64,
    "Deimv2Model": 64,
    "PPDocLayoutV2ForObjectDetection": 64,
    "PPDocLayoutV3Model": 64,
    "PPDocLayoutV4Model": 64,
    "DeformableDetrModel": 64,
    "DepthProModel": 128,
    "TimmWrapperModel": 160,
    "TimmBackbone": 160,
    "UperNetForSemanticSegmentation": 64,
    "Mask2FormerModel": 64,
}
FEEDS |= {name: draw_squares(side) for name, side in SQUARES.items()}
TRACKERS = ("Sam2VideoModel", "EdgeTamVideoModel", "Sam3TrackerVideoModel")
