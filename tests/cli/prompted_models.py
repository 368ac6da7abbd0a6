"""Models of images and words in folders, as transformers saves them with their processors, with random weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
TEXT = {**SMALL, "num_key_value_heads": 3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 3}
VISION = {**SMALL, "image_size": 24, "patch_size": 4}  # 6 x 6 patches
WORDS = ["what", "is", "on", "her", "red", "hat", "?", "a", "the", "cat"]
IMAGE = "<image>"


def make_tokenizer(*images: str, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are whole words; some have names, such as image_token."""
    names = ["<unk>", "<s>", "</s>", "<pad>", *images, *named.values(), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    more = {"additional_special_tokens": [*images, *named.values()], **({"extra_special_tokens": named} if named else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **more, **special)


@torch.no_grad()
def widen(model: Any) -> Any:
    """The model with weights so wide that attention is far from uniform."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
    return model.eval()


def save_llava(place: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(IMAGE)
    text = {**TEXT, "vocab_size": len(tokenizer), "model_type": "llama"}
    config = LlavaConfig(
        vision_config={**VISION, "model_type": "clip_vision_model"},
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    widen(LlavaForConditionalGeneration(config)).save_pretrained(place)
    reader = CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24})
    LlavaProcessor(
        reader, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(place)


def save_paligemma(place: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(IMAGE)
    reader = SiglipImageProcessorPil(size={"height": 24, "width": 24})
    reader.image_seq_length = 36
    processor = PaliGemmaProcessor(reader, tokenizer)  # adds 1,024 tokens that name places
    text = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": len(processor.tokenizer), "model_type": "gemma"}
    config = PaliGemmaConfig(
        vision_config={**VISION, "model_type": "siglip_vision_model", "projection_dim": 24, "vision_use_head": False},
        text_config=text,
        projection_dim=24,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
    )
    widen(PaliGemmaForConditionalGeneration(config)).save_pretrained(place)
    processor.save_pretrained(place)


class PackingProcessor:
    """What the processor of Qwen2-VL does, which transformers does not load without torchvision."""

    chat_template = "..."
    image_token = "<|image_pad|>"

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer("<|vision_start|>", "<|vision_end|>", self.image_token, "<|video_pad|>")
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)

    def apply_chat_template(self, messages: Sequence[Any], add_generation_prompt: bool) -> str:
        (image, text) = messages[0]["content"]
        assert image == {"type": "image"}
        assert add_generation_prompt
        return f"<|vision_start|> {self.image_token} <|vision_end|> {text['text']}"

    def __call__(self, images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        found = self.image_processor(images=images, return_tensors=return_tensors)
        count = int(found["image_grid_thw"].prod()) // 4
        expanded = text.replace(self.image_token, " ".join([self.image_token] * count))
        asked = self.tokenizer(expanded, return_tensors=return_tensors)
        are_images = (asked["input_ids"] == self.tokenizer.convert_tokens_to_ids(self.image_token)).long()
        return {**asked, **found, "mm_token_type_ids": are_images}


def make_qwen() -> tuple[Any, PackingProcessor]:
    torch.manual_seed(0)
    processor = PackingProcessor()
    ids = processor.tokenizer.convert_tokens_to_ids
    vision = {"depth": 2, "embed_dim": 24, "hidden_size": 24, "num_heads": 3, "patch_size": 4, "mlp_ratio": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        vision_config=vision,
        text_config={**TEXT, "vocab_size": len(processor.tokenizer), "rope_parameters": rope},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return widen(Qwen2VLForConditionalGeneration(config)), processor
