"""Media: the sizes of the images and of the sound that a forward was given, and which of its tokens stand for images."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

IMAGES, WORD_IDS = "pixel_values", "input_ids"  # names of arguments in transformers
PACKED_SIZES = ("image_grid_thw", "grid_thw")
ORIGINAL_SIZES = "image_sizes"
SOUNDS = ("input_features", "input_values")
CHANNELS = (1, 3, 4)  # of an image among the arguments of a model whose arguments have other names
IMAGE_TOKENS = ("image_token_id", "image_token_index")  # attributes of a config


@dataclass(frozen=True)
class Media:
    """The images or the sound among the arguments of a forward."""

    images: int = 0
    size: tuple[int, int] | None = None  # height and width of the images in pixels
    channels: int = 3
    grids: tuple[tuple[int, int], ...] = ()  # rows and columns of patches of each image, of a model that is given patches
    image_tokens: tuple[int, ...] = ()  # which tokens of a text stand for images
    tokens: int = 0  # tokens of the text; 0 if there is none, or if its rows have their images at different places
    rows: int = 1  # batch rows of the text
    sound: str | None = None  # the argument that is sound
    original_sizes: tuple[tuple[int, int], ...] = ()  # height and width of each image before it was cut into tiles


def read_media(module: nn.Module, args: Any, kwargs: Any) -> Media | None:
    """Return the images, their tokens, or the sound among the arguments of a module's forward; None if there are none."""
    arguments = bind_arguments(module, args, kwargs)
    sound = next((name for name in SOUNDS if isinstance(arguments.get(name), Tensor)), None)
    if sound is not None:
        return Media(sound=sound)
    pixels = find_images(arguments)
    grids = next((found for found in (read_grids(arguments.get(name)) for name in PACKED_SIZES) if found), ())
    text = find_image_tokens(module, arguments.get(WORD_IDS))
    if grids:
        return Media(len(grids), None, 3, grids, *text)
    if pixels is not None and pixels.dim() >= 4:
        size = int(pixels.shape[-2]), int(pixels.shape[-1])
        sizes = read_original_sizes(arguments.get(ORIGINAL_SIZES))
        channels = int(pixels.shape[-3])
        return Media(int(pixels.shape[:-3].numel()), size, channels, (), *text, original_sizes=sizes)
    return Media(0, None, 3, (), *text) if text[0] else None


def find_pixels(module: nn.Module, args: Any, kwargs: Any, is_named: bool) -> Tensor | None:
    """Return the images (..., c, height, width) among the arguments of a module's forward; None if there are none.

    Beside a text only an argument with their name counts: a mask of the text may have the dimensions of an image.
    """
    arguments = bind_arguments(module, args, kwargs)
    pixels = find_images({IMAGES: arguments.get(IMAGES)} if is_named else arguments)
    return pixels if pixels is not None and pixels.dim() >= 4 else None


def join_media(former: Media | None, later: Media | None) -> Media | None:
    """Return the media of two forwards of a run: a generation may read its images in one and their tokens in another.

    A step that continues the text may read a token that stands for an image elsewhere: the first text counts.
    """
    if former is None or later is None:
        return later or former
    seen = later if later.images or later.sound else former
    text = former if former.tokens else later
    sizes = text.original_sizes or seen.original_sizes
    return replace(seen, image_tokens=text.image_tokens, tokens=text.tokens, rows=text.rows, original_sizes=sizes)


def bind_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # a forward without a signature
        names = []
    return {**{str(n): value for n, value in enumerate(args)}, **dict(zip(names, args, strict=False)), **kwargs}


def find_images(arguments: dict[str, Any]) -> Tensor | None:
    """Return the images (..., c, height, width), or packed patches, among arguments."""
    named = arguments.get(IMAGES)
    if isinstance(named, Tensor):
        return named
    some = (one for one in arguments.values() if isinstance(one, Tensor) and one.dim() == 4 and one.is_floating_point())
    return next((one for one in some if one.shape[1] in CHANNELS), None)


def read_grids(sizes: Any) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of patches of each image that is given as patches; empty if one is a film."""
    if not isinstance(sizes, Tensor) or sizes.dim() != 2 or sizes.shape[1] != 3:
        return ()
    found = [(int(frames), int(rows), int(columns)) for frames, rows, columns in sizes.tolist()]
    return tuple((rows, columns) for _, rows, columns in found) if all(frames == 1 for frames, _, _ in found) else ()


def read_original_sizes(sizes: Any) -> tuple[tuple[int, int], ...]:
    """Return the height and width of each image before it was cut into tiles; empty if they are not given."""
    is_table = isinstance(sizes, Tensor) and sizes.dim() == 2 and sizes.shape[1] == 2
    return tuple((int(height), int(width)) for height, width in sizes.tolist()) if is_table else ()


def find_image_tokens(module: nn.Module, ids: Any) -> tuple[tuple[int, ...], int, int]:
    """Return which tokens of a text (b, t) stand for images, the number of its tokens, and its rows.

    Nothing and 0 if there is no text, or if its rows have their images at different places.
    """
    config = getattr(module, "config", None)
    token = next((one for one in (getattr(config, name, None) for name in IMAGE_TOKENS) if isinstance(one, int)), None)
    if token is None or not isinstance(ids, Tensor) or ids.dim() != 2 or not len(ids):
        return (), 0, 1
    are_images = ids == token
    if not torch.equal(are_images, are_images[:1].expand_as(are_images)):
        return (), 0, 1
    return tuple(are_images[0].nonzero().flatten().tolist()), int(ids.shape[1]), int(ids.shape[0])
