"""A small vision transformer: an image is cut into patches, which attend to each other and to a class token.

Read it from top to bottom. Source: Dosovitskiy et al. 2021, with the normalization before each part of a block.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError, ShapeError, WeightsError
from regard.layers import checks
from regard.matmul import refuse_quantized
from regard.mechanism import attention, heads
from regard.mechanism.heads import describe_indivisible_width
from regard.weights.vision_weights import read_vision_weights, write_vision_weights

INIT = 0.02  # standard deviation of the class token and the positions


@dataclass(frozen=True)
class VisionConfig:
    """The sizes of a VisionTransformer: of images and patches in pixels, of the model, and the number of classes."""

    image_size: int = 16
    patch_size: int = 2
    num_channels: int = 1
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    hidden_size: int = 48
    classes: int = 10

    def __post_init__(self) -> None:
        checks.check_sizes(**asdict(self))
        if self.image_size % self.patch_size:
            raise ConfigError(f"patch_size must divide image_size, got {self.patch_size} and {self.image_size}.")
        if self.hidden_size % self.num_attention_heads:
            widths = "hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads
            raise ConfigError(describe_indivisible_width(*widths))


class VisionAttention(nn.Module):
    """Attention of every token to every token, with several heads."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads.split(one, self.count) for one in self.qkv(x).chunk(3, -1))
        context: Tensor = self.out(heads.join(attention(q, k, v)))
        return context


class VisionBlock(nn.Module):
    """Attention between the tokens, then a network at each token; each adds to its input."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), VisionAttention(width, count)
        self.norm2, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.outer(F.gelu(self.inner(self.norm2(x))))
        return result


class VisionTransformer(nn.Module):
    """Patches of images (b, c, height, width) to logits (b, classes), read from a class token."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        width, patches = config.hidden_size, (config.image_size // config.patch_size) ** 2
        self.cut = nn.Conv2d(config.num_channels, width, config.patch_size, config.patch_size)
        self.class_token = nn.Parameter(INIT * torch.randn(1, 1, width))
        self.positions = nn.Parameter(INIT * torch.randn(1, patches + 1, width))
        self.blocks = nn.ModuleList(VisionBlock(width, config.num_attention_heads) for _ in range(config.num_hidden_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, config.classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits of the classes. Raises ShapeError for images of another size."""
        wanted = (self.config.num_channels, self.config.image_size, self.config.image_size)
        if pixel_values.dim() != 4 or pixel_values.shape[1:] != wanted:
            raise ShapeError(f"images must have the axes (b, {', '.join(map(str, wanted))}), got {tuple(pixel_values.shape)}.")
        patches = self.cut(pixel_values).flatten(2).transpose(1, 2)  # (b, c, rows, columns) -> (b, patches, c)
        x = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits

    def save(self, folder: str | Path) -> None:
        """Write the sizes, and the weights in float16, into an existing folder."""
        refuse_quantized(self)
        write_vision_weights(Path(folder), asdict(self.config), self.state_dict())

    @classmethod
    def load(cls, folder: str | Path) -> "VisionTransformer":
        """Return the model in a folder, in float32 and evaluation mode. Raises WeightsError if there is none."""
        sizes, tensors = read_vision_weights(Path(folder))
        try:
            model = cls(VisionConfig(**sizes))
            model.load_state_dict(tensors)
        except (RegardError, TypeError, RuntimeError) as error:  # RuntimeError: torch's, for names and shapes
            raise WeightsError(f"{folder} does not describe a valid vision transformer: {error}") from None
        return model.eval()
