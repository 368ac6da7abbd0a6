"""Models of images and words of transformers, and an image with a question about it as their input."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from regard.cli.device import format_first_line
from regard.cli.image_model import find_images, find_source, restore_pixels
from regard.cli.model_loading import convert_loading_errors, is_only_in_cache, refuse_missing_weights, silence_transformers
from regard.errors import ConfigError, RegardError
from regard.mechanism.arguments import add_article
from regard.observe.media import IMAGES, WORD_IDS, read_grids
from regard.show.image_input import Pixels

IMAGE_TEXT = "AutoModelForImageTextToText"
FORMS = "a folder with config.json, weights and a processor, or owner/model on the hub"
GRIDS = "image_grid_thw"  # the sizes in patches of images that are given as packed patches
LABELS = "labels"  # what some processors add for training


@dataclass(frozen=True, eq=False)
class ImagePrompter:
    """A model that answers questions about images, and its processor."""

    name: str
    model: Any
    processor: Any

    def prepare(self, pixels: Pixels, prompt: str) -> tuple[dict[str, Any], Pixels]:
        """Return the arguments of the model for an image and a prompt, and the image as the model sees it."""
        text = self.format_prompt(prompt)
        begin = getattr(self.processor.tokenizer, "bos_token", None)
        has_begin = {"add_special_tokens": False} if begin and text.startswith(begin) else {}  # by its chat template
        with silence_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what processors themselves do
            try:
                found = dict(self.processor(images=pixels, text=text, return_tensors="pt", **has_begin))
            except Exception as error:  # processors may raise anything
                place = getattr(self.processor, "image_token", None) or "the place of the image"
                raise ConfigError(
                    f"the processor of {self.name} does not read one image with this prompt: {format_first_line(error)} "
                    f"Write {place} once in the prompt, or leave it out."
                ) from None
        if WORD_IDS not in found:
            raise ConfigError(f"the processor of {self.name} makes no {WORD_IDS} of the prompt: leave out --text.")
        found.pop(LABELS, None)
        dtype = next(self.model.parameters()).dtype
        inputs = {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in found.items()}
        return inputs, self.find_seen(found, pixels)

    def format_prompt(self, prompt: str) -> str:
        """Return a prompt with the place of the image: by the chat template, or else the image first.

        A prompt that names the place itself stays as it is.
        """
        image = getattr(self.processor, "image_token", None)
        if image and image in prompt:
            return prompt
        if getattr(self.processor, "chat_template", None):
            message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
            return str(self.processor.apply_chat_template([message], add_generation_prompt=True))
        return f"{image or ''}{prompt}"

    def find_seen(self, found: dict[str, Any], pixels: Pixels) -> Pixels:
        """Return the image as the model sees it: resized and cropped, or resized alone where it is given as packed patches."""
        images, reader = find_images(found.get(IMAGES)), getattr(self.processor, "image_processor", None)
        grids = read_grids(found.get(GRIDS))
        if grids and not getattr(reader, "do_center_crop", False):
            from PIL import Image

            patch = int(getattr(reader, "patch_size", 1))
            (rows, columns), *_ = grids
            size = columns * patch, rows * patch
            return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        if images is None:
            raise ConfigError(f"the processor of {self.name} makes no image of the file that this command can show.")
        return restore_pixels(images[0], reader)

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, with the space that it begins with where the tokenizer marks one."""
        tokenizer = self.processor.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(list(ids))
        texts = (str(tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in ids)
        return [
            f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text
            for piece, text in zip(pieces, texts, strict=True)
        ]

    def join(self, ids: Sequence[int]) -> str:
        """Return the text of tokens together, without special tokens such as that of its end."""
        return str(self.processor.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def run(self, inputs: dict[str, Any], tokens: int) -> tuple[list[int], Tensor | None]:
        """Run the model and return the ids of the tokens that it generated, or without any, the logits of the next token."""
        settings = {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1}
        try:
            with silence_transformers():
                if not tokens:
                    return [], self.model(**inputs).logits[0, -1]
                found = self.model.generate(**inputs, **settings)
        except RegardError:
            raise
        except (ValueError, LookupError) as error:  # as if the text is too long, or has other tokens of the image
            raise ConfigError(
                f"{self.name} does not run on this prompt: {format_first_line(error)} "
                "Shorten the prompt and --tokens, and check that the processor is that of the model."
            ) from error
        return found[0, inputs[WORD_IDS].shape[1] :].tolist(), None


def load_image_prompter(name: str) -> ImagePrompter:
    """Load the model of images and words in a folder or on the hub, with its processor.

    Raises ConfigError if transformers is not installed or the model reads no words beside images, DataError if it cannot be
    loaded.
    """
    source = find_source(name)
    import transformers

    is_folder = Path(source).is_dir()
    is_local = is_folder or is_only_in_cache(name, FORMS)
    with convert_loading_errors(name, "config.json, weights, a tokenizer and an image processor,"):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=is_local)
        if type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            kind = type(config).__name__.removesuffix("Config")
            raise ConfigError(f"{name} is {add_article(kind)}, which continues no text about an image: leave out --text.")
        if any(getattr(one, "is_encoder_decoder", False) for one in (config, getattr(config, "text_config", None))):
            raise ConfigError(
                f"{name} writes its text in a decoder that does not read the prompt, whose words the maps of this command are "
                "of: leave out --text, or take a model that continues the prompt, such as LLaVA."
            )
        processor = transformers.AutoProcessor.from_pretrained(source, local_files_only=is_local)
        kind = getattr(transformers, IMAGE_TEXT)
        model, found = kind.from_pretrained(source, dtype="auto", output_loading_info=True, local_files_only=is_local)
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ConfigError(f"{name} has no processor of images and words: save that of its model beside its weights.")
    refuse_missing_weights(name, found["missing_keys"])
    return ImagePrompter(Path(source).name if is_folder else name, model.eval(), processor)
