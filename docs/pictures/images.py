"""The pictures of docs/images.md, drawn again: `python -m docs.pictures.images`. Needs the `dev` extra, and Chromium.

The digits are read by the small vision transformer that is included. Swin, the model of images and words, and Whisper have
random weights, as their titles state: they show where things are, not what a trained model looks at. The photograph of Grace
Hopper is that of the U.S. Navy, in the public domain, which matplotlib ships.
"""

import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from docs.chromium import launch_chromium
from docs.pictures.page import settle
from matplotlib import cbook
from PIL import Image
from playwright.sync_api import sync_playwright
from torch import nn
from torch.nn import functional

import regard
from regard.cli.image_model import load_image_model
from regard.cli.image_reader import record_image
from regard.show.figure import Picture
from regard.show.image_input import Pixels, load_image
from regard.show.image_overlay import draw_image_overlay
from regard.show.sound_figure import draw_sound
from regard.show.word_heat_figure import draw_word_heat_map
from regard.weights.vision_weights import INCLUDED

FOLDER = Path(__file__).parent
RANDOM = "random weights"
SIDE = 224  # pixels of the photograph
SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
RATE, SECONDS = 16_000, 6


def main() -> None:
    """Draw them all."""
    mpl.rcParams["svg.hashsalt"] = "regard"
    recording, seen = read_digit(3)
    save(draw_image_overlay(recording, seen, 2, range(4)), "image-digit.png")
    photo = load_photo()
    save(draw_swin(photo), "image-swin.png")
    words = read_words(photo)
    asked = [n for n, word in enumerate(words.tokens or ()) if word.startswith(" ")]
    save(draw_image_overlay(words, photo, 0, query=asked, part="language_model", title=f"LLaVA, {RANDOM}"), "image-words.png")
    save(draw_denoised(photo), "image-heat.png")
    save(draw_whisper(), "sound-whisper.png")
    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        shoot(browser, recording, seen, "view=image&layer=2&head=1&q=29", "page-image.png")
        shoot(
            browser,
            words,
            photo,
            "view=image&part=language_model&layer=1&heads=all",
            "page-image-dark.png",
            dark=True,
            width=390,
        )
        browser.close()


def read_digit(digit: int) -> tuple[regard.Recording, Pixels]:
    """Return the included model's recording of an example, and the image as it saw it."""
    model = load_image_model("digits")
    seen = record_image(model, load_image(INCLUDED["digits"] / f"{digit}.png"))
    return seen.recording, seen.images[0]


def load_photo() -> Pixels:
    """Return the photograph, cut to a square."""
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        image = Image.open(file).convert("RGB")
        side = min(image.size)
        return np.asarray(image.crop((0, 0, side, side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS))


@torch.no_grad()
def widen(model: nn.Module) -> Any:
    """Draw the weights wider than transformers does, so that attention is far from uniform."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
    return model.eval()


def normalize(photo: Pixels) -> torch.Tensor:
    """Return a photograph as a model takes it."""
    return torch.tensor(photo, dtype=torch.float32).movedim(-1, 0)[None] / 127.5 - 1


def draw_swin(photo: Pixels) -> Picture:
    """Draw what a patch of a small Swin looks at, in a layer whose windows are shifted."""
    from transformers import SwinConfig, SwinModel

    model = widen(SwinModel(SwinConfig(image_size=SIDE, patch_size=8, embed_dim=24, depths=[2, 2], num_heads=[2, 4])))
    with torch.no_grad(), regard.record(model) as recording:
        model(normalize(photo))
    return draw_image_overlay(recording, photo, 1, [0, 1], query=(9, 11), title=f"Swin, {RANDOM}")


def read_words(photo: Pixels) -> regard.Recording:
    """Return the recording of a small model of images and words on a question about the photograph."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    side = 14
    vision = {**SMALL, "image_size": SIDE, "patch_size": SIDE // side, "model_type": "clip_vision_model"}
    text = {**SMALL, "vocab_size": 61, "model_type": "llama", "num_key_value_heads": 4}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    model = widen(LlavaForConditionalGeneration(config))
    asked = ["What", " is", " on", " her", " hat"]
    ids = torch.tensor([[1, *[60] * side**2, *range(5, 5 + len(asked))]])
    with torch.no_grad(), regard.record(model) as recording:
        model(input_ids=ids, pixel_values=normalize(photo))
    recording.model, recording.tokens = f"a small LLaVA, {RANDOM}", ["<s>", *["<image>"] * side**2, *asked]
    return recording


class LatentAttention(nn.Module):
    """Cross attention of latents, at a resolution, to words, as in the UNet of a diffusion model."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor, self.q, self.k = factor, nn.Linear(3, 32), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        latents = functional.avg_pool2d(x, self.factor).flatten(2).mT
        q, k = (one.unflatten(-1, (2, 16)).transpose(1, 2) for one in (self.q(latents), self.k(words)))
        return functional.scaled_dot_product_attention(q, k, k)


@torch.no_grad()
def draw_denoised(photo: Pixels) -> Picture:
    """Draw where two words of a prompt have the attention of the latents of a photograph, in a model with random weights."""
    model, latents = widen(nn.ModuleList(map(LatentAttention, (1, 2, 4)))), functional.avg_pool2d(normalize(photo), 8)
    words = 3 * torch.randn(1, 5, 16)
    with regard.record(model) as recording:
        for layer in model:
            layer(latents, words)
    recording.tokens = ["<s>", "a", " portrait", " with", " flag"]
    return draw_word_heat_map(recording, photo, [2, 4], title=f"an image, {RANDOM}")


def draw_whisper() -> Picture:
    """Draw sound above the cross attention of a small Whisper, with the times of its tokens."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    count = 50 * SECONDS
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    lengths = {"max_source_positions": count, "max_target_positions": 60, "vocab_size": 80, "num_mel_bins": 20, "d_model": 64}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = widen(WhisperForConditionalGeneration(WhisperConfig(**sizes, **lengths, **ends)))
    time = torch.arange(RATE * SECONDS) / RATE
    sound = torch.sin(2 * torch.pi * (200 + 60 * time) * time) * (torch.sin(2 * torch.pi * 0.6 * time) ** 2)
    spectrum = torch.stft(sound, 400, RATE // 100, window=torch.hann_window(400), return_complex=True).abs()[:, : 2 * count]
    mels = (spectrum[:200].unflatten(0, (20, 10)).mean(1) + 1e-3).log10()
    with torch.no_grad(), regard.record(model) as recording:
        model(input_features=mels[None], decoder_input_ids=torch.randint(4, 80, (1, 18)))
    times = regard.token_times(recording)
    return draw_sound(recording, sound, times=times, rate=RATE, title=f"Whisper, {RANDOM}, and the times of its tokens")


def save(picture: Picture, name: str) -> None:
    """Write a figure."""
    picture.savefig(FOLDER / name, metadata={"Software": None}, dpi=110, bbox_inches="tight")


def shoot(
    browser: Any, recording: regard.Recording, image: Pixels, link: str, name: str, dark: bool = False, width: int = 1280
) -> None:
    """Take a picture of the page of a recording and its image."""
    look = {"color_scheme": "dark" if dark else "light", "viewport": {"width": width, "height": 800}}
    with tempfile.TemporaryDirectory() as folder, browser.new_context(**look) as context:
        path = Path(folder) / "page.html"
        regard.page(recording, path, image=image)
        page = context.new_page()
        page.goto(f"{path.as_uri()}#{link}")
        settle(page)
        page.screenshot(path=FOLDER / name)


if __name__ == "__main__":
    main()
