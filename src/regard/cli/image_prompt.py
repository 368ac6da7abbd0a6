"""Models of images and words of transformers, and an image with a question about it as their input."""

import inspect
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.cli.device import format_first_line
from regard.cli.image_model import find_images, find_source, restore_pixels
from regard.cli.image_reader import Outcome, PreparedImage, measure_layout
from regard.cli.model_loading import convert_loading_errors, is_only_in_cache, refuse_missing_weights, silence_transformers
from regard.errors import ConfigError, RegardError
from regard.mechanism.arguments import add_article
from regard.observe.token_places.media import IMAGES, WORD_IDS, find_image_tokens, read_grids
from regard.show.image_input import Pixels
from regard.show.terminal import escape_text
from regard.weights.vision_weights import INCLUDED

IMAGE_TEXT = "AutoModelForImageTextToText"
FORMS = "a folder with config.json, weights and a processor, or owner/model on the hub"
WORDED = "llava-hf/llava-1.5-7b-hf"  # a model of images and words
GRIDS = "image_grid_thw"  # the sizes in patches of images that are given as packed patches
LABELS = "labels"  # what some processors add for training


@dataclass(frozen=True, eq=False)
class ImagePrompter:
    """A model that answers questions about images, its processor, a prompt, and the number of tokens that it shall write."""

    name: str
    model: Any
    processor: Any
    prompt: str
    tokens: int = 0

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the prompt, and a decoder writes beside it."""
        config = self.model.config
        return any(getattr(one, "is_encoder_decoder", False) for one in (config, getattr(config, "text_config", None)))

    def prepare(self, pixels: Pixels) -> PreparedImage:
        """Return an image and the prompt as the input of the model."""
        found = self.encode(pixels)
        if WORD_IDS not in found:
            raise ConfigError(f"the processor of {self.name} makes no {WORD_IDS} of the prompt: leave out --text.")
        tiles = self.list_tiles(found, pixels)
        layout = measure_layout(tiles, pixels, lambda other: self.list_tiles(self.encode(other), other))
        dtype = next(self.model.parameters()).dtype
        inputs = {
            name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in found.items()
            if name != LABELS
        }
        return PreparedImage(inputs, tiles, layout)

    def encode(self, pixels: Pixels) -> dict[str, Any]:
        """Return what the processor makes of an image and the prompt. Raises ConfigError if it does not read them.

        A processor that adds the tokens of the image itself, as those of BLIP-2 and Florence-2 do, is given the prompt alone.
        """
        found, failures = [], []
        for text in dict.fromkeys((self.format_prompt(self.prompt), self.prompt)):
            begin = getattr(self.processor.tokenizer, "bos_token", None)
            has_begin = {"add_special_tokens": False} if begin and text.startswith(begin) else {}  # by its chat template
            with silence_transformers(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what processors themselves do
                try:
                    found.append(dict(self.processor(images=pixels, text=text, return_tensors="pt", **has_begin)))
                except Exception as error:  # processors may raise anything
                    failures.append(format_first_line(error))
        if found:
            counts = [len(find_image_tokens(self.model, one.get(WORD_IDS))[0]) for one in found]
            return found[-1] if 0 < counts[-1] < counts[0] else found[0]
        place = getattr(self.processor, "image_token", None) or "the place of the image"
        raise ConfigError(
            f"the processor of {self.name} does not read one image with this prompt: {failures[0]} "
            f"Write {place} once in the prompt, or leave it out."
        )

    def format_prompt(self, prompt: str) -> str:
        """Return a prompt with the place of the image: by the chat template, or else the image first.

        A prompt that names the place itself stays as it is.
        """
        image = str(getattr(self.processor, "image_token", None) or "")  # of some it is an AddedToken
        if image and image in prompt:
            return prompt
        if getattr(self.processor, "chat_template", None):
            message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt}]}
            return str(self.processor.apply_chat_template([message], add_generation_prompt=True))
        return f"{image}{prompt}"

    def list_tiles(self, found: dict[str, Any], pixels: Pixels) -> list[Pixels]:
        """Return the images that the model sees: resized and cropped, or resized alone where they are packed patches."""
        images, reader = find_images(found.get(IMAGES)), getattr(self.processor, "image_processor", None)
        grids = read_grids(found.get(GRIDS))
        if grids and not getattr(reader, "do_center_crop", False):
            from PIL import Image

            patch = int(getattr(reader, "patch_size", 1))
            (rows, columns), *_ = grids
            size = columns * patch, rows * patch
            return [np.array(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))]
        if images is None:
            raise ConfigError(f"the processor of {self.name} makes no image of the file that this command can show.")
        return [restore_pixels(one, reader) for one in images]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, with the space that it begins with where the tokenizer marks one."""
        tokenizer = self.processor.tokenizer
        pieces = tokenizer.convert_ids_to_tokens(list(ids))  # None of an id that it does not know
        texts = (str(tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in ids)
        return [
            f" {text}" if (piece or "").startswith("▁") and not text.startswith(" ") else text
            for piece, text in zip(pieces, texts, strict=True)
        ]

    def join(self, ids: Sequence[int]) -> str:
        """Return the text of tokens together, without special tokens such as that of its end."""
        return str(self.processor.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def run(self, inputs: dict[str, Any]) -> Outcome:
        """Run the model on the prompt, and let it write as many tokens as were asked for.

        Without any, the outcome is the likeliest next word; with some, their attention is recorded too, but for the last one,
        which the model does not read.
        """
        asked = inputs[WORD_IDS][0].tolist()
        start = time.perf_counter()
        try:
            with silence_transformers():
                read, written, logits = self.write(inputs, asked) if self.tokens else self.read_prompt(inputs, asked)
        except RegardError:
            raise
        except (ValueError, LookupError) as error:  # as if the text is too long, or has other tokens of the image
            raise ConfigError(
                f"{self.name} does not run on this prompt: {format_first_line(error)} "
                "Shorten the prompt and --tokens, and check that the processor is that of the model."
            ) from error
        words: Any = self.decode(read)
        if self.has_encoder:
            words = {"rows": self.decode(written) if self.tokens else words, "columns": self.decode(asked), "read": words}
        sentence = f"{len(asked):,} tokens, of the image and the text, in {time.perf_counter() - start:.1f} s."
        if logits is None:
            return Outcome(f"{sentence} It writes “{escape_text(self.join(written))}”.", None, words)
        shares = logits.detach().float().softmax(-1)
        best = int(shares.argmax())
        word, share = self.decode([best])[0].strip(), float(shares[best])
        sentence += f" The likeliest next word is “{escape_text(word)}” ({share:.2f})."
        return Outcome(sentence, (f"the logit of the next word “{word}”", share, logits[best]), words)

    def read_prompt(self, inputs: dict[str, Any], asked: list[int]) -> tuple[list[int], list[int], Tensor]:
        """Return the ids that the model read, none that it wrote, and the logits of the next token."""
        if not self.has_encoder:
            return asked, [], self.model(**inputs).logits[0, -1]
        begin = getattr(self.model.generation_config, "decoder_start_token_id", None)
        begin = self.model.generation_config.bos_token_id if begin is None else begin
        ids = torch.tensor([[begin]])
        return [begin], [], self.model(**inputs, decoder_input_ids=ids).logits[0, -1]

    def write(self, inputs: dict[str, Any], asked: list[int]) -> tuple[list[int], list[int], None]:
        """Return the ids that the model read, and those that it wrote."""
        settings = {"max_new_tokens": self.tokens, "do_sample": False, "num_beams": 1}
        found = self.model.generate(**inputs, **settings, return_dict_in_generate=True, output_scores=True)
        ids = found.sequences[0].tolist()
        before = ids[: len(ids) - len(found.scores)] or asked  # a model that was given embeddings returns what it wrote alone
        written = ids[len(ids) - len(found.scores) :]
        return [*before, *written[:-1]], written, None


def load_image_prompter(name: str, prompt: str, tokens: int = 0) -> ImagePrompter:
    """Load the model of images and words in a folder or on the hub, with its processor, for a prompt.

    Raises ConfigError if transformers is not installed or the model reads no words beside images, DataError if it cannot be
    loaded.
    """
    if name in INCLUDED and not Path(name).exists():
        raise ConfigError(
            f"the model {name} reads no words: pass --model with one of images and words, such as {WORDED}, or leave out "
            "--text."
        )
    source = find_source(name)
    import transformers

    is_folder = Path(source).is_dir()
    is_local = is_folder or is_only_in_cache(name, FORMS)
    with convert_loading_errors(name, "config.json, weights, a tokenizer and an image processor,"):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=is_local)
        if type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            kind = type(config).__name__.removesuffix("Config")
            raise ConfigError(f"{name} is {add_article(kind)}, which continues no text about an image: leave out --text.")
        reads = inspect.signature(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].forward).parameters
        if WORD_IDS not in reads:
            raise ConfigError(
                f"{name} writes from the image alone and reads no prompt: leave out --text. For the cross attention of the "
                "words that it writes, record model.generate in Python and pass the image to regard.page."
            )
        processor = transformers.AutoProcessor.from_pretrained(source, local_files_only=is_local)
        kind = getattr(transformers, IMAGE_TEXT)
        model, found = kind.from_pretrained(source, dtype="auto", output_loading_info=True, local_files_only=is_local)
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ConfigError(f"{name} has no processor of images and words: save that of its model beside its weights.")
    refuse_missing_weights(name, found["missing_keys"])
    return ImagePrompter(Path(source).name if is_folder else name, model.eval(), processor, prompt, tokens)
