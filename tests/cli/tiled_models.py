"""Models of images in tiles, packed patches or cross attention, with random weights and processors, saved in folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from cli.prompted_models import IMAGE, SMALL, TEXT, VISION, make_tokenizer, widen

SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
LLAMA = {**TEXT, "model_type": "llama"}


def save(place: Path, model: Any, processor: Any) -> None:
    model.save_pretrained(place)
    processor.save_pretrained(place)


def save_llava_next(place: Path) -> None:
    """Tiles of 24 x 24 pixels, 6 x 6 patches, beside the whole image."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(IMAGE)
    pinpoints = [[24, 48], [48, 24], [48, 48], [24, 72]]
    config = hf.LlavaNextConfig(
        vision_config={**VISION, "model_type": "clip_vision_model"},
        text_config={**LLAMA, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_grid_pinpoints=pinpoints,
    )
    reader = hf.LlavaNextImageProcessorPil(
        size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}, image_grid_pinpoints=pinpoints
    )
    settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaNextProcessor(reader, tokenizer, **settings)
    save(place, widen(hf.LlavaNextForConditionalGeneration(config)), processor)


def save_idefics3(place: Path, name: str = "Idefics3") -> None:
    """Tiles of 24 x 24 pixels, 6 x 6 patches, of which 2 x 2 are one token, with words between them."""
    torch.manual_seed(0)
    tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    named = {"fake_image_token": "<fake_token_around_image>", "image_token": IMAGE, "global_image_token": "<global-img>"}
    tokenizer = make_tokenizer(*tags, **named, end_of_utterance_token="<end_of_utterance>")
    reader = getattr(hf, f"{name}ImageProcessorPil")(size={"longest_edge": 72}, max_image_size={"longest_edge": 24})
    given = [getattr(hf, f"{name}VideoProcessor")()] if name == "SmolVLM" else []
    processor = getattr(hf, f"{name}Processor")(reader, tokenizer, *given, image_seq_len=9)
    config = getattr(hf, f"{name}Config")(
        vision_config=VISION,
        text_config={**LLAMA, "vocab_size": len(processor.tokenizer)},
        image_token_id=processor.image_token_id,
        scale_factor=2,
    )
    save(place, widen(getattr(hf, f"{name}ForConditionalGeneration")(config)), processor)


def save_internvl(place: Path) -> None:
    """Tiles of 24 x 24 pixels, 6 x 6 patches, of which 2 x 2 are one token, one behind the other."""
    torch.manual_seed(0)
    named = {"start_image_token": "<img>", "end_image_token": "</img>"}
    tokenizer = make_tokenizer(**named, context_image_token="<ctx>", video_token="<video>")
    reader = hf.GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, crop_to_patches=True, max_patches=6)
    processor = hf.InternVLProcessor(reader, tokenizer, hf.InternVLVideoProcessor(), image_seq_length=9)
    config = hf.InternVLConfig(
        vision_config={**VISION, "image_size": [24, 24], "patch_size": [4, 4]},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(tokenizer)},
        image_token_id=tokenizer.convert_tokens_to_ids("<ctx>"),
        image_seq_length=9,
        downsample_ratio=0.5,
    )
    save(place, widen(hf.InternVLForConditionalGeneration(config)), processor)


def save_gemma3(place: Path) -> None:
    """6 x 6 patches pooled to 3 x 3 tokens."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(boi_token="<boi>", eoi_token="<eoi>", image_token=IMAGE)
    reader = hf.Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor = hf.Gemma3Processor(reader, tokenizer, image_seq_length=9)
    config = hf.Gemma3Config(
        vision_config=SIGLIP,
        text_config={**TEXT, "model_type": "gemma3_text", "head_dim": 8, "vocab_size": len(tokenizer)},
        mm_tokens_per_image=9,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        boi_token_index=tokenizer.convert_tokens_to_ids("<boi>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
    )
    save(place, widen(hf.Gemma3ForConditionalGeneration(config)), processor)


def save_qwen(place: Path, name: str = "Qwen2VL") -> None:
    """Packed patches of 4 x 4 pixels, of which 2 x 2 are one token; in Qwen2.5 the tower attends in windows of 2 x 2 tokens."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    vision = {"depth": 2, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    if name == "Qwen2VL":
        vision |= {"embed_dim": 24, "hidden_size": 24, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 24, "out_hidden_size": 24, "intermediate_size": 32, "window_size": 16}
        vision |= {"fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = getattr(hf, "Qwen2VLConfig" if name == "Qwen2VL" else "Qwen2_5_VLConfig")(
        vision_config=vision,
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    reader = hf.Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    template = (
        "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    films = hf.Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
    kind = getattr(hf, "Qwen2VLProcessor" if name == "Qwen2VL" else "Qwen2_5_VLProcessor")
    model = getattr(hf, "Qwen2VLForConditionalGeneration" if name == "Qwen2VL" else "Qwen2_5_VLForConditionalGeneration")
    save(place, widen(model(config)), kind(reader, tokenizer, films, chat_template=template))


def save_florence2(place: Path) -> None:
    """An encoder that reads 2 x 3 patches, their mean and the prompt, and a decoder that looks at it."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(image_token=IMAGE)
    reader = hf.CLIPImageProcessorPil(size={"height": 64, "width": 64}, do_center_crop=False)
    reader.image_seq_length = 5
    text = {"model_type": "bart", "vocab_size": len(tokenizer), "d_model": 24, "encoder_layers": 2, "decoder_layers": 2}
    text |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    text |= {"decoder_start_token_id": 2, "forced_eos_token_id": None, "eos_token_id": None, "forced_bos_token_id": None}
    vision = {"depths": [1, 1, 1, 1], "embed_dim": [12, 12, 24, 24], "num_heads": [3, 3, 3, 3], "num_groups": [3, 3, 3, 3]}
    config = hf.Florence2Config(
        vision_config={**vision, "projection_dim": 24, "window_size": 4},
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    save(place, widen(hf.Florence2ForConditionalGeneration(config)), hf.Florence2Processor(reader, tokenizer))


def save_blip(place: Path) -> None:
    """A decoder that reads the prompt, and whose cross attention looks at 6 x 6 patches and a class token."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    text = {**SMALL, "vocab_size": len(tokenizer), "encoder_hidden_size": 24, "sep_token_id": 2, "eos_token_id": 2}
    config = hf.BlipConfig(vision_config=VISION, text_config={**text, "bos_token_id": 1, "pad_token_id": 3}, projection_dim=24)
    reader = hf.BlipImageProcessorPil(size={"height": 24, "width": 24})
    save(place, widen(hf.BlipForConditionalGeneration(config)), hf.BlipProcessor(reader, tokenizer))


def save_kosmos2(place: Path) -> None:
    """Four learned queries that look at the patches, and stand for them among the words."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    text = {"vocab_size": 2000, "embed_dim": 24, "layers": 2, "ffn_dim": 16, "attention_heads": 3}
    vision = {**VISION, "model_type": "kosmos_2_vision_model"}
    config = hf.Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=64)
    reader = hf.CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    model = widen(hf.Kosmos2ForConditionalGeneration(config))
    save(place, model, hf.Kosmos2Processor(reader, tokenizer))


def save_blip2(place: Path, is_encoder_decoder: bool = False) -> None:
    """Five learned queries that look at 6 x 6 patches, before the words of OPT, or of the encoder of T5."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(IMAGE)
    text = {"model_type": "opt", **SMALL, "ffn_dim": 16, "word_embed_proj_dim": 24, "pad_token_id": 3}
    if is_encoder_decoder:
        text = {"model_type": "t5", "d_model": 24, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 3}
    config = hf.Blip2Config(
        vision_config=VISION,
        qformer_config={**SMALL, "vocab_size": 30, "encoder_hidden_size": 24},
        text_config={**text, "vocab_size": len(tokenizer)},
        num_query_tokens=5,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    reader = hf.BlipImageProcessorPil(size={"height": 24, "width": 24})
    model = widen(hf.Blip2ForConditionalGeneration(config))
    model.generation_config.decoder_start_token_id = 3
    save(place, model, hf.Blip2Processor(reader, tokenizer, num_query_tokens=5))


def save_mllama(place: Path) -> None:
    """Cross attention to up to four tiles of 24 x 24 pixels, each a class token and 6 x 6 patches."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(image_token="<|image|>")
    vision = {"hidden_size": 24, "num_hidden_layers": 1, "num_global_layers": 1, "num_attention_heads": 3, "attention_heads": 3}
    vision |= {"intermediate_size": 16, "image_size": 24, "patch_size": 4, "max_num_tiles": 4, "vision_output_dim": 48}
    ratios = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": ratios}
    text = {**TEXT, "vocab_size": len(tokenizer), "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    config = hf.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<|image|>")
    )
    reader = hf.MllamaImageProcessorPil(size={"height": 24, "width": 24}, max_image_tiles=4)
    save(place, widen(hf.MllamaForConditionalGeneration(config)), hf.MllamaProcessor(reader, tokenizer))


MAKERS: dict[str, Callable[[Path], None]] = {
    "llava_next": save_llava_next,
    "idefics3": save_idefics3,
    "smolvlm": lambda place: save_idefics3(place, "SmolVLM"),
    "internvl": save_internvl,
    "gemma3": save_gemma3,
    "qwen2_vl": save_qwen,
    "qwen2_5_vl": lambda place: save_qwen(place, "Qwen2_5_VL"),
    "florence2": save_florence2,
    "blip": save_blip,
    "blip2": save_blip2,
    "blip2 of T5": lambda place: save_blip2(place, True),
    "kosmos2": save_kosmos2,
    "mllama": save_mllama,
}
NEEDS = {  # packages without which transformers does not load the processor
    "smolvlm": ("torchvision", "num2words"),
    "internvl": ("torchvision",),
    "qwen2_vl": ("torchvision",),
    "qwen2_5_vl": ("torchvision",),
}
