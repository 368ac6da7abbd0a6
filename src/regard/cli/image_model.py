"""Models of images, of transformers and the one that is included, and images as their inputs."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.cli.device import format_first_line
from regard.cli.image_reader import Best, Outcome, PreparedImage, measure_layout
from regard.cli.model_loading import (
    check_model_name,
    convert_loading_errors,
    is_only_in_cache,
    refuse_missing_weights,
    silence_transformers,
)
from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import add_article, describe_value
from regard.models.vision_transformer import VisionTransformer
from regard.observe.token_places.media import IMAGES, WORD_IDS
from regard.show.image_input import Pixels, load_image
from regard.show.terminal import escape_text
from regard.weights.vision_weights import INCLUDED

TOWERS = ("vision_model", "vision_tower", "visual", "image_encoder", "vision_encoder")  # attributes that are image towers
CLASSIFIER, BASE = "AutoModelForImageClassification", "AutoModel"
FORMS = f"{', '.join(INCLUDED)}, owner/model on the hub, or a folder with config.json and weights"
HALF = 0.5  # mean and standard deviation where a folder has no processor
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MAX_DEPTH = 3  # of towers within models within models


@dataclass(frozen=True, eq=False)
class ImageModel:
    """A model that reads images, or the part of a model that does; its processor, and what is known of its classes."""

    name: str
    model: nn.Module
    processor: Any
    classes: Mapping[int, str]

    def prepare(self, pixels: Pixels) -> PreparedImage:
        """Return an image as the input of the model: resized and cropped, or cut into tiles that fill rows and columns.

        Of tiles that do not, the model is given the first.
        """
        if self.processor is None:
            return self.resize(pixels)
        images = self.cut(pixels)
        tiles = [restore_pixels(one, self.processor) for one in images]
        layout = measure_layout(tiles, pixels, lambda other: [restore_pixels(one, self.processor) for one in self.cut(other)])
        return PreparedImage({IMAGES: images if layout is not None else images[:1]}, tiles, layout)

    def cut(self, pixels: Pixels) -> Tensor:
        """Return the images (n, c, height, width) that the processor makes of an image: several if it cuts it into tiles."""
        with silence_transformers():
            found = find_images(self.processor(images=pixels, return_tensors="pt")[IMAGES])
        if found is None:
            raise ConfigError(
                f"{self.name} takes images as packed patches, which this command lays out only beside words: pass --text, or "
                "record it in Python, and pass the image to regard.page."
            )
        return found

    def resize(self, pixels: Pixels) -> PreparedImage:
        """Return an image resized to the size in the config, as numbers from -1 to 1."""
        from PIL import Image

        size = getattr(self.model.config, "image_size", None)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        if not all(isinstance(side, int) for side in sides):
            raise ConfigError(f"{self.name} has neither preprocessor_config.json nor an image_size in config.json.")
        channels = int(getattr(self.model.config, "num_channels", 3))
        enlarges = sides[0] >= pixels.shape[0] and sides[1] >= pixels.shape[1]
        how = Image.Resampling.NEAREST if enlarges else Image.Resampling.BILINEAR
        seen = np.asarray(Image.fromarray(pixels).resize((sides[1], sides[0]), how))
        numbers = torch.tensor(seen, dtype=torch.float32).movedim(-1, 0) / 255
        numbers = numbers.mean(0, keepdim=True) if channels == 1 else numbers
        return PreparedImage({IMAGES: ((numbers - HALF) / HALF)[None]}, [seen])

    def run(self, inputs: dict[str, Any]) -> Outcome:
        """Run the model and return the class that it says, if it has classes."""
        best = self.find_class(self.model(**{IMAGES: inputs[IMAGES].to(next(self.model.parameters()).dtype)}))
        sentence = f"The model says {escape_text(best[0])} ({best[1]:.2f})." if best else ""
        return Outcome(sentence, best and (f"the logit of {best[0]}", *best[1:]))

    def find_class(self, output: Any) -> Best | None:
        """Return the likeliest class, its probability and its logit; None if the model has no classes."""
        logits = getattr(output, "logits", output)
        if not self.classes or not isinstance(logits, Tensor) or logits.dim() != 2:
            return None
        shares = logits[0].detach().float().softmax(-1)
        best = int(shares.argmax())
        return str(self.classes.get(best, best)), float(shares[best]), logits[0, best]


def load_image_model(name: str) -> ImageModel:
    """Load the model of images in a folder or on the hub; of a model of images and text, the part that reads images.

    Raises ConfigError if transformers is not installed or the model reads no images, DataError if it cannot be loaded.
    """
    check_model_name(name)
    if name in INCLUDED and not Path(name).exists():
        own = VisionTransformer.load(INCLUDED[name])
        return ImageModel(name, own, None, {n: str(n) for n in range(own.config.classes)})
    source = find_source(name)
    import transformers

    path = Path(source)
    is_local = path.is_dir() or is_only_in_cache(name, FORMS)
    with convert_loading_errors(name, "config.json and weights,"):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=is_local)
        classifies = any("ForImageClassification" in one for one in config.architectures or ())
        kind = getattr(transformers, CLASSIFIER if classifies else BASE)
        model, found = kind.from_pretrained(source, dtype="auto", output_loading_info=True, local_files_only=is_local)
        model.eval()
    tower = find_tower(model)
    if tower is None:
        raise ConfigError(f"{name} is {add_article(type(model).__name__)}, which reads no images: use `regard look` for text.")
    refuse_missing_weights(name, [key for key in found["missing_keys"] if "pooler" not in key])
    classes = getattr(config, "id2label", None) or {} if classifies and tower is model else {}
    return ImageModel(path.name if path.is_dir() else name, tower, load_processor(source, is_local), classes)


def find_source(name: str) -> str:
    """Return the folder of a model, or its name on the hub.

    Raises DataError if it is neither, ConfigError if transformers is not installed.
    """
    check_model_name(name)
    if find_spec("transformers") is None:
        raise ConfigError("loading this model needs transformers: pip install transformers.")
    path = Path(name).expanduser()
    if not path.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DataError(f"{name} is not a folder: a model is a folder with config.json and weights, or a name on the hub.")
    return str(path) if path.is_dir() else name


def find_images(found: Any) -> Tensor | None:
    """Return the images (n, c, height, width) that a processor made; None for another form, as packed patches."""
    if isinstance(found, Tensor) and found.dim() > 4:  # of one text, (1, n, c, height, width)
        found = found.flatten(0, -4)
    return found if isinstance(found, Tensor) and found.dim() == 4 else None


def restore_pixels(image: Tensor, processor: Any) -> Pixels:
    """Return the pixels of an image (c, height, width) that a processor has normalized."""
    mean, std = (getattr(processor, one, None) for one in ("image_mean", "image_std"))
    if mean is None or std is None or not getattr(processor, "do_normalize", True):
        return load_image(image)
    mean, std = (torch.tensor(one, dtype=image.dtype).view(-1, 1, 1) for one in (mean, std))
    return load_image((image * std + mean).clamp(0, 1))


def find_tower(model: nn.Module, depth: int = MAX_DEPTH) -> nn.Module | None:
    """Return a model that reads images alone, or the part of it that does; None if there is none."""
    if reads_images_alone(model):
        return model
    if not depth:
        return None
    inner = (getattr(model, one, None) for one in (*TOWERS, "model"))
    found = (find_tower(one, depth - 1) for one in inner if isinstance(one, nn.Module))
    return next((one for one in found if one is not None), None)


def reads_images_alone(model: nn.Module) -> bool:
    """Return whether images are the main input of a model, or the first argument and the only one that it must be given."""
    if getattr(model, "main_input_name", None) == IMAGES:
        return True
    parameters = list(inspect.signature(model.forward).parameters.values())
    if not parameters or parameters[0].name != IMAGES:
        return False
    return not any(needs_value(one) or one.name == WORD_IDS for one in parameters[1:])


def needs_value(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter has to be given in a call."""
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def load_processor(source: str, is_local: bool) -> Any:
    """Return the image processor of a model, of files that are here if `is_local`; None for a folder that has none."""
    import transformers

    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in PROCESSOR_FILES):
        return None
    try:
        with silence_transformers():
            kind: Any = transformers.AutoImageProcessor
            return kind.from_pretrained(source, local_files_only=is_local)
    except Exception as error:  # transformers may raise anything for a damaged file
        raise DataError(f"the image processor of {source} could not be loaded: {format_first_line(error)}") from None


def find_example(image: str, model: str) -> Path:
    """Return the file of an image; of one digit, for the included model, the example of it that was not trained on."""
    if not image.strip():
        raise DataError(f"the image must be a file, or for the model {', '.join(INCLUDED)} a digit; got {image!r}.")
    path = Path(image).expanduser()
    if path.is_dir():
        raise DataError(f"{image} is a folder: give an image in it, a PNG, a JPEG or another file that Pillow reads.")
    if model not in INCLUDED and not path.exists() and image.isdecimal() and len(image) == 1:
        raise DataError(f"{image} is not a file. The digits 0 to 9 are examples of {', '.join(INCLUDED)}: leave out --model.")
    if model in INCLUDED and not path.exists() and image.isdecimal():
        if len(image) > 1:
            raise DataError(
                f"{describe_value(image)} is neither a file nor a digit from 0 to 9: {model} has an example of each."
            )
        return INCLUDED[model] / f"{int(image)}.png"
    return path
