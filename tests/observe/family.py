"""What a family of models is, and what it reads: a class of transformers with a small config and random weights.

Its weights are drawn wider than transformers would, so that attention is far from uniform.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

B, T, S = 3, 13, 11  # sequences, their tokens, those of a target
LINES = (0, 5, 2)  # how much of each sequence is padding
WORDS, SPOTS = 101, 9  # a vocabulary; the patches of a picture
ANY, RIGHT, NONE = ("none", "right", "left"), ("none", "right"), ("none",)  # where padding may stand


def tokens(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Sequences of tokens, padded on one side or on none."""
    ids, mask = torch.randint(3, WORDS - 1, (B, T)), torch.ones(B, T, dtype=torch.long)
    if side == "none":
        return {"input_ids": ids}
    for row, line in enumerate(LINES):
        mask[row, slice(None, line) if side == "left" else slice(T - line, None)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def pairs(config: Any, side: str = "none") -> dict[str, Tensor]:
    """A source, which may be padded, and a target."""
    return {**tokens(config, side), **target(config)}


def target(config: Any) -> dict[str, Tensor]:
    """What a decoder has said so far."""
    return {"decoder_input_ids": torch.randint(3, WORDS, (B, S))}


def pixels(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures."""
    config = getattr(config, "vision_config", config)
    size = config.image_size
    return {
        "pixel_values": torch.randn(B, getattr(config, "num_channels", 3), *([size, size] if isinstance(size, int) else size))
    }


def draw_pictures_and_noise(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, and numbers whose order says which patches are left out."""
    return {**pixels(config), "noise": torch.rand(B, SPOTS)}


def draw_pictures_and_prefix(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, and words after the tokens that stand for what queries found in a picture."""
    ids = tokens(config)["input_ids"]
    ids[:, : config.num_query_tokens] = config.image_token_index
    return {**pixels(config), "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def draw_pictures_and_words(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures, and words about them."""
    return {**pixels(config), **tokens(config, side)}


def among(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Pictures that stand among words."""
    ids = tokens(config)["input_ids"]
    ids[:, 2 : 2 + SPOTS] = config.image_token_id
    kinds = {"token_type_ids": (ids == config.image_token_id).int()} if config.model_type == "paligemma" else {}
    return {"input_ids": ids, **pixels(config), **kinds}


def draw_packed_pictures(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Two pictures of unlike sizes, packed into one sequence of patches, among words."""
    grid = torch.tensor([[1, 4, 2], [1, 2, 6]])
    vision = config.vision_config
    patches = torch.randn(int(grid.prod(1).sum()), vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    ids = torch.randint(3, WORDS - 9, (1, T))
    ids[:, 2:4] = ids[:, 6:9] = config.image_token_id
    kinds = (ids == config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def film(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Moving pictures."""
    return {"pixel_values": torch.randn(B, config.num_frames, 3, config.image_size, config.image_size)}


def clip(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Moving pictures of a model that crops them."""
    return {"pixel_values_videos": torch.randn(B, config.frames_per_clip, 3, config.crop_size, config.crop_size)}


def waves(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Sound, the end of which may be padding."""
    mask = torch.ones(B, 107, dtype=torch.long)
    for row, line in enumerate(LINES):
        mask[row, 107 - 9 * line :] = 0
    return {"input_values": torch.randn(B, 107), **({} if side == "none" else {"attention_mask": mask})}


def spoken(config: Any, side: str = "none") -> dict[str, Tensor]:
    """Sound, and the words that were said."""
    return {"input_values": torch.randn(B, 1500), **target(config)}


def spectrum(config: Any, side: str = "none") -> dict[str, Tensor]:
    """The spectrum of sound, and the words that were said."""
    return {"input_features": torch.randn(B, config.num_mel_bins, 2 * config.max_source_positions), **target(config)}


class Widened(TorchFunctionMode):
    """Computes in float64 what models round to float32 whatever their own dtype: norms, rotations, the softmax of scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = Tensor.double if func is Tensor.float else func
        return func(*map(widen, args), **{name: widen(x) for name, x in (kwargs or {}).items()})


@dataclass(frozen=True, eq=False)
class Family:
    """A family, what it is made of and fed, and on which sides its sequences may be padded."""

    name: str
    model: str
    settings: dict[str, Any]
    inputs: Callable[..., dict[str, Tensor]] = tokens
    sides: tuple[str, ...] = NONE
    quick: bool = False  # whether it is in the everyday run
    spread: float = 1.2  # of its weights; less where scores would be large
    beside: int = 0  # attentions that are recorded and that the model never hands out
    apart: bool = False  # whether it calls its kernel without the registry, and hands out tensors as it does outside

    def build(self, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
        """The model, in evaluation. In float64 it is equal to itself on every path, if it runs inside Widened."""
        import transformers

        transformers.logging.set_verbosity_error()
        chosen = getattr(transformers, self.model)
        torch.manual_seed(3)
        model: nn.Module = chosen(chosen.config_class(**self.settings, **settings)).eval()
        widen(model, self.spread)
        if dtype == torch.float64 and model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the grouped product takes no float64
        return model.to(dtype)

    def feed(self, model: nn.Module, side: str = "none") -> dict[str, Tensor]:
        """What it reads, in its dtype."""
        torch.manual_seed(5)
        given = self.inputs(model.config, side)
        return {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in given.items()}


@torch.no_grad()
def widen(model: nn.Module, spread: float) -> None:
    """Draws the weights anew, so that scores of attention are about 1 and biases and sinks are not zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.numel():
            nn.init.normal_(parameter, std=spread / parameter[0].numel() ** 0.5)
        elif parameter.dim():
            parameter.add_(0.2 * torch.randn_like(parameter))
