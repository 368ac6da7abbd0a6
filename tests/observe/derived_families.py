"""Families of transformers whose small configs are derived from their defaults: fewer layers, heads, experts and words.

They are held against the softmaxes that they compute themselves, in float32.
"""

import importlib.util
import inspect
import math
import pkgutil
import re
import warnings
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from observe.derived_changes import CHANGES, merge
from observe.derived_feeds import FEEDS, TRACKERS, track
from observe.derived_part_changes import NEEDS, PART_CHANGES
from observe.eager_weights import are_equal
from observe.family import widen
from observe.handwritten_families import OwnWeights, find_largest_difference
from regard.observe import record

B, T, WORDS, TARGET, SAMPLES, FRAMES = 2, 13, 101, 7, 400, 60
ROPE = {"mrope_section": [2, 2, 2]}
SIZES: dict[str, int | float | tuple[int, ...]] = {  # patterns of the names of settings, and their numbers
    r"(.*_)?vocab_size|codebook_size": WORDS,
    r"(num_|vision_)?layers|n_layers?|depth|(num_)?(en|de)coder_layers|(.*_)?num_hidden_layers|num_blocks": 2,
    r"n_heads?|num_heads|(en|de)coder_attention_heads|(.*_)?num_attention_heads|attention_heads": 4,
    r".*num_key_value_heads|num_kv_heads": 2,
    r"hidden_size|d_model|embed_dim|n_embd|dim|embedding_size|(en|de)coder_hidden_size|out_hidden_size|output_dim": 48,
    r"projection_dim|hidden_dim|text_embed_dim|embedding_dim": 48,
    r".*ffn_dim|d_ff|mlp_dim|dim_feedforward|.*intermediate_size": 64,
    r"head_dim|attention_head_dim|d_kv|global_head_dim|swa_head_dim|qk_head_dim": 12,
    r"v_head_dim|qk_nope_head_dim": 8,
    r"qk_rope_head_dim": 4,
    r"kv_lora_rank|q_lora_rank": 16,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_top_k|moe_k|top_k_experts|moe_topk|experts_per_token": 2,
    r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace": 1,
    r"image_size": 32,
    r"patch_size": 8,
    r"max_position_embeddings|max_source_positions|max_target_positions|n_positions|max_seq_len": 128,
    r"image_token_(id|index)": 99,
    r"video_token_(id|index)": 98,
    r"audio_token_(id|index)": 97,
    r"pad_token_id": 0,
    r"bos_token_id|decoder_start_token_id": 1,
    r"eos_token_id": 2,
    r"sliding_window|attention_chunk_size": 5,
    r"index_topk": 4,
    r"index_n_heads": 2,
    r"index_head_dim": 8,
    r"conv_dim": (16, 16),
    r"conv_kernel": (8, 3),
    r"conv_stride": (4, 2),
    r"num_conv_pos_embeddings": 5,
    r"num_conv_pos_embedding_groups": 2,
    r"(.*coder_)?layerdrop": 0.0,
}
DERIVED = (
    "AfmoeModel",
    "AlignTextModel",
    "Apertus1p5TextModel",
    "AriaModel",
    "AudioFlamingo3Model",
    "AXK1Model",
    "AXK2Model",
    "AyaVisionModel",
    "BeamModel",
    "BigBirdPegasusModel",
    "BridgeTowerTextModel",
    "CanaryModel",
    "ClapTextModel",
    "CLIPSegTextModel",
    "Cohere2MoeModel",
    "Cohere2VisionModel",
    "ConditionalDetrEncoder",
    "Cosmos3EdgeModel",
    "Cosmos3OmniModel",
    "CsmDepthDecoderModel",
    "CwmModel",
    "DecisionTransformerGPT2Model",
    "DeepseekOcr2SamVisionEncoder",
    "DeepseekVLModel",
    "DeepseekVLHybridModel",
    "DetrEncoder",
    "DiaEncoder",
    "Dots3NoteTextModel",
    "DPREncoder",
    "DPTModel",
    "EmbeddingGemma2Model",
    "Emu3TextModel",
    "Ernie4_5_MoeModel",
    "EvollaModel",
    "Exaone4_5_Model",
    "ExaoneMoeModel",
    "FlexOlmoModel",
    "FlintModel",
    "FuyuModel",
    "Gemma4UnifiedModel",
    "Glm4MoeLiteModel",
    "GlmMoeDsaModel",
    "GlmAsrModel",
    "Granite4VisionTextModel",
    "GraniteDoclingModel",
    "GraniteMoeSharedModel",
    "GteModel",
    "HiggsAudioV2Model",
    "HrmTextModel",
    "HYV3Model",
    "HYV4Model",
    "HyperCLOVAXModel",
    "HyperCLOVAXVisionV2Model",
    "Idefics2Model",
    "Idefics3Model",
    "InklingTextModel",
    "Inkling2TextModel",
    "Inkling2LoopTextModel",
    "InstructBlipVisionModel",
    "InstructBlipVideoVisionModel",
    "InternVLModel",
    "Jais2Model",
    "JanusVisionModel",
    "JinaEmbeddingsV3Model",
    "Kimi_K25Model",
    "Kolibri1Model",
    "Kosmos2TextModel",
    "Kosmos2_5Model",
    "LagunaModel",
    "LaraMiniModel",
    "LasrEncoder",
    "Lfm2VlModel",
    "LightOnOcrModel",
    "LlavaNextModel",
    "LlavaNextVideoModel",
    "LlavaOnevisionModel",
    "MaskFormerModel",
    "MellumModel",
    "MiMoV2FlashModel",
    "MiniCPM3Model",
    "MiniMaxM2Model",
    "Ministral3Model",
    "Mistral3Model",
    "MistralLarge4Model",
    "MLCDVisionModel",
    "MllamaModel",
    "ModernVBertModel",
    "Molmo2TextModel",
    "MoonshineStreamingEncoder",
    "MossTranscribeDiarizeModel",
    "MuseGlimmerModel",
    "MuseSparkTextModel",
    "MusicFlamingoModel",
    "Nemotron3_5TranscribeAsrAudioModel",
    "Nemotron3DiarizationAudioModel",
    "NemotronAsrStreamingEncoder",
    "OmniASRModel",
    "OpenAIPrivacyFilterModel",
    "Ovis2Model",
    "Owlv2TextModel",
    "OwlViTTextModel",
    "ParakeetEncoder",
    "Phi4MultimodalModel",
    "PixioModel",
    "PixtralVisionModel",
    "PPFormulaNetTextModel",
    "QianfanOCRModel",
    "Qwen2AudioModel",
    "Qwen3ASRModel",
    "Qwen3OmniMoeThinkerModel",
    "Qwen3VLModel",
    "Qwen3VLMoeModel",
    "RfDetrDinov2Backbone",
    "RoCBertModel",
    "SamVisionModel",
    "Sam3ViTModel",
    "SamHQVisionModel",
    "Sapiens2Model",
    "SeamlessM4TEncoder",
    "SeamlessM4Tv2Encoder",
    "Siglip2TextModel",
    "SmolVLMModel",
    "SolarOpenModel",
    "Step3p7VisionModel",
    "Tipsv2Model",
    "UltrabertModel",
    "UltraVBertModel",
    "UnlimitedOcrModel",
    "VaultGemmaModel",
    "VideoLlama3Model",
    "VideoLlavaModel",
    "VideoPrismTextModel",
    "VipLlavaModel",
    "VoxtralModel",
    "Wav2Vec2ConformerModel",
    "XCLIPTextModel",
    "YoutuModel",
    *CHANGES,
    *(name for name in PART_CHANGES if importlib.util.find_spec(NEEDS.get(name, "torch"))),
)


def shrink(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config to change, and those of its parts."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("config") and value:
            found[name] = shrink(value) | {key: value[key] for key in ("model_type",) if key in value}
        elif isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool):
            sizes = (size for pattern, size in SIZES.items() if re.fullmatch(pattern, name))
            size = next(sizes, None)
            if size is not None and isinstance(value, (list, tuple)) == isinstance(size, tuple):
                found[name] = size
    if "qk_rope_head_dim" in settings:  # keys of latents: each head has its own, and the rotated part alone is counted
        found |= {name: 4 for name in ("num_key_value_heads", "head_dim") if name in settings}
    rope = settings.get("rope_parameters")
    return found | ({"rope_parameters": {**rope, **ROPE}} if isinstance(rope, dict) and rope.keys() & ROPE.keys() else {})


def derive_settings(chosen: Any) -> dict[str, Any]:
    """Return the small settings of a class of models; none where its config refuses its own defaults."""
    try:
        return shrink(chosen.config_class().to_dict())
    except StrictDataclassError:
        return {}


def find_class(name: str) -> Any:
    """Return a class of transformers, which may not be among its public names."""
    import transformers

    if hasattr(transformers, name):
        return getattr(transformers, name)
    for folder in pkgutil.iter_modules(importlib.import_module("transformers.models").__path__):
        source = f"transformers.models.{folder.name}.modeling_{folder.name}"
        if folder.name.replace("_", "") in name.lower().replace("_", "") and importlib.util.find_spec(source):
            module = importlib.import_module(source)
            if hasattr(module, name):
                return getattr(module, name)
    raise LookupError(name)


def build(name: str) -> nn.Module:
    """Return a model with random weights and a small config."""
    import transformers

    transformers.logging.set_verbosity_error()
    chosen = find_class(name)
    torch.manual_seed(3)
    settings = merge(derive_settings(chosen), (CHANGES | PART_CHANGES).get(name, {}))
    model: nn.Module = chosen(chosen.config_class(**settings)).eval()
    widen(model, 1.0)
    return model


def feed(model: nn.Module) -> dict[str, Any]:
    """Return words, images or sound, whichever the forward takes first, and a target where it has a decoder."""
    torch.manual_seed(5)
    if type(model).__name__ in TRACKERS:
        return track(model)
    if type(model).__name__ in FEEDS:
        return FEEDS[type(model).__name__](model.config)
    taken, config = inspect.signature(model.forward).parameters, model.config
    vision, bands = getattr(config, "vision_config", config), getattr(config, "num_mel_bins", None)
    bands = bands or getattr(config, "feature_size", 80)
    longest = getattr(config, "max_source_positions", None)
    sound = torch.randn(B, bands, 2 * longest) if longest else torch.randn(B, FRAMES, bands)
    has_target = "decoder_input_ids" in taken
    given: dict[str, Tensor] = {"decoder_input_ids": torch.randint(5, 90, (B, TARGET))} if has_target else {}
    if "input_ids" in taken and not (has_target and "input_features" in taken):
        return given | {"input_ids": torch.randint(5, 90, (B, T))}
    if "pixel_values" in taken:
        size = getattr(vision, "image_size", 32)
        side = size if isinstance(size, int) else 32
        return given | {"pixel_values": torch.randn(B, getattr(vision, "num_channels", None) or 3, side, side)}
    if "input_values" in taken:
        return given | {"input_values": torch.randn(B, SAMPLES)}
    return given | ({"input_features": sound} if "input_features" in taken else {"inputs_embeds": torch.randn(B, T, 48)})


def compare_derived(name: str) -> tuple[int, float]:
    """Return the number of maps, and the largest difference of one from the nearest softmax of its size.

    The column of a sink is left out, and those of padding without weight; of weights that are no softmax it is the difference
    from the layer's output. Raises AssertionError if the output changes inside `record`, if nothing is recorded or something is
    missed.
    """
    own, outputs, differences = OwnWeights(), [], []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(name)
        for context in (own, record(model)):
            given = feed(model)
            torch.manual_seed(1)
            with context as recording:
                outputs.append(model(**given))
    assert are_equal(*outputs)
    assert recording.calls
    assert not recording.missed
    for call in recording.calls:
        if call.kind == "implicit":
            differences.append(call.map.certificate().error)
            continue
        weights = call.map.dense().double()
        alike = [x for one in own.found for x in list_cuts(one.double(), weights.shape[-1]) if x.numel() == weights.numel()]
        alike += [x.transpose(1, 2) for x in alike if x.dim() == 5]  # windows before or after the heads
        differences.append(min((find_largest_difference(x.reshape(weights.shape), weights) for x in alike), default=math.inf))
    return len(differences), max(differences)


def list_cuts(x: Tensor, keys: int) -> list[Tensor]:
    """Return a softmax, the same without its last column, and the first keys of it if the others have no weight."""
    return [x, x[..., :-1], *([x[..., :keys]] if x.shape[-1] > keys + 1 and not x[..., keys:].any() else [])]
