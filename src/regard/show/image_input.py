"""Images as the figures and the page take them: a file, a PIL image, an array or a tensor."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import describe_value

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
FORMS = "a file, a PIL image, an array (height, width, 3) or (height, width), or a tensor (3, height, width)"
GREY, COLORS = 1, 3  # channels
MOST_8_BITS, MOST_16_BITS = 255, 65535
MAX_NAME = 200  # letters of a file's name in a message


def load_image(image: Any) -> Pixels:
    """Return the pixels (height, width, 3) of an image: a file, a PIL image, an array (height, width, 3) or a tensor (3, ...).

    Integers of 16 bits are shares of 65535, or bytes if none is above 255. Other numbers that are no bytes are those of a
    model's input: 0 to 1, or else stretched from the smallest to the largest.
    Raises DataError if a file is no image, ConfigError for another value or if Pillow is not installed.
    """
    if isinstance(image, (str, Path)):
        return open_image(Path(image))
    if isinstance(image, Tensor):
        if image.layout is not torch.strided or image.is_quantized or image.is_nested or image.is_complex():
            raise ConfigError(f"image must be {FORMS}; got {describe_value(image)}.")
        found = image.detach().cpu()
        found = found[0] if found.dim() == 4 and len(found) == 1 else found
        channels_first = found.dim() == 3 and found.shape[0] in (GREY, COLORS)
        array = (found.movedim(0, -1) if channels_first else found).to(
            torch.float64 if found.is_floating_point() else found.dtype
        )
        return convert_array(array.numpy(), image)
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # a PIL image, without importing it
        return convert_picture(image)
    if isinstance(image, np.ndarray):
        return convert_array(image, image)
    raise ConfigError(f"image must be {FORMS}; got {describe_value(image)}.")


def load_images(image: Any) -> list[Pixels]:
    """Return the pixels of one image, of each of a list of them, or of none."""
    if image is None:
        return []
    return [load_image(one) for one in image] if isinstance(image, (list, tuple)) else [load_image(image)]


def open_image(path: Path) -> Pixels:
    """Return the pixels of a file. Raises DataError if it is none, ConfigError if Pillow is not installed."""
    try:
        pillow: Any = import_module("PIL.Image")
        operations: Any = import_module("PIL.ImageOps")
    except ImportError:
        raise ConfigError("reading an image needs Pillow: pip install pillow.") from None
    try:
        is_file = path.is_file()
    except OSError:  # a name that is too long
        is_file = False
    if not is_file:
        name = str(path)[:MAX_NAME]
        raise DataError(f"{name} is not a file: an image is a PNG, a JPEG or another file that Pillow reads.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)  # an error from twice as many pixels on
            with pillow.open(path) as opened:
                return convert_picture(operations.exif_transpose(opened))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(f"{path} could not be read as an image: {str(error).rstrip('.')}.") from None


def convert_picture(picture: Any) -> Pixels:
    """Return the pixels of a PIL image. One of more than 8 bits is scaled, which `convert("RGB")` would cut off at 255."""
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        return convert_array(scale_integers(np.asarray(picture)), picture)
    if picture.mode == "F":
        low, high = picture.getextrema()
        if not (low >= 0 and 1 < high <= MOST_8_BITS):
            return convert_array(np.asarray(picture), picture)
    return np.array(picture.convert("RGB"))


def scale_integers(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers from 0 to 255 as bytes, those up to 65535 as shares of it, and a range beyond as it is."""
    low, high = numbers.min(initial=0), numbers.max(initial=0)
    if low < 0 or high > MOST_16_BITS:
        return numbers
    return numbers.astype(np.uint8) if high <= MOST_8_BITS else numbers.astype(np.float64) / MOST_16_BITS


def convert_array(found: npt.NDArray[Any], value: Any) -> Pixels:
    """Return the pixels of an array (height, width, 3), (height, width, 1) or (height, width). Raises ConfigError."""
    array = found[..., None] if found.ndim == 2 else found
    if array.ndim != 3 or array.shape[2] not in (GREY, COLORS) or not array.size:
        raise ConfigError(f"image must be {FORMS}; got {describe_value(value)}.")
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:  # as 16-bit files are read
        array = scale_integers(array)
    if array.dtype != np.uint8:
        numbers = array.astype(np.float64)
        low, high = float(numbers.min()), float(numbers.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ConfigError("image must have finite numbers, got NaN or infinity.")
        if low < 0 or high > 1:
            numbers = (numbers - low) / (high - low) if high > low else np.full_like(numbers, 0.5)
        array = np.rint(255 * numbers).astype(np.uint8)
    return np.array(np.broadcast_to(array, (*array.shape[:2], COLORS)), order="C")
