"""Small models that see, with random weights in float64, recorded on one image."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, SwinConfig, SwinModel, ViTConfig, ViTModel

import regard
from observe.family import Widened
from regard import Recording

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 8}
WORDS = ["<s>", "what", *["<image>"] * 9, "is", "this"]


def make_pixels(rows: int, columns: int) -> Tensor:
    return torch.randn(1, 3, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def widen(model: Any) -> Any:
    """The model in float64, its weights so wide that attention is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=1.2 / parameter[0].numel() ** 0.5)
    return model.eval().double()


def make_vit() -> Any:
    torch.manual_seed(0)
    return widen(ViTModel(ViTConfig(**SMALL, image_size=[15, 21], patch_size=3)))


@cache
def vit() -> tuple[Recording, Tensor]:
    """Of 5 x 7 patches and a class token, and the model's own weights of every layer, (1, h, q, k)."""
    return record_with_eager(make_vit(), pixel_values=make_pixels(15, 21))


@cache
def swin() -> tuple[Recording, Tensor]:
    """Of 8 x 8, then 4 x 4 patches in windows of 4 x 4."""
    torch.manual_seed(0)
    sizes = {"patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 3], "window_size": 4}
    return record_with_eager(widen(SwinModel(SwinConfig(image_size=16, **sizes))), pixel_values=make_pixels(16, 16))


def make_llava() -> Any:
    torch.manual_seed(0)
    vision = {**SMALL, "image_size": 9, "patch_size": 3, "model_type": "clip_vision_model"}
    text = {**SMALL, "vocab_size": 53, "model_type": "llama", "num_key_value_heads": 3}
    return widen(LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=50)))


@cache
def llava() -> tuple[Recording, Tensor]:
    """Of 13 tokens, nine of which are 3 x 3 patches."""
    ids = torch.tensor([[1, 7, *[50] * 9, 8, 9]])
    recording, weights = record_with_eager(make_llava(), input_ids=ids, pixel_values=make_pixels(9, 9))
    recording.tokens = WORDS
    return recording, weights


def record_with_eager(model: Any, **given: Tensor) -> tuple[Recording, list[Tensor]]:
    """The recording, and the weights that the model computes by itself without a kernel, by its layers."""
    with torch.no_grad(), Widened(), regard.record(model) as recording:
        model(**given)
    model.set_attn_implementation("eager")
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name in recording.names:
            module.register_forward_hook(lambda _, __, result, name=name: found.update({name: result[1]}))
    with torch.no_grad(), Widened():
        model(**given)
    part = "language_model" if "language_model" in recording.last.parts else None
    return recording, [found[name] for name in recording.layers(part=part)]
