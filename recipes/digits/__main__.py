"""python -m recipes.digits: trains the small vision transformer on scikit-learn's handwritten digits, in minutes on two cores.

It needs scikit-learn and Pillow: pip install scikit-learn pillow. The digits are 8 x 8 pixels, UCI's optical recognition data
set (CC BY 4.0), which scikit-learn ships. Each pixel becomes a patch of 2 x 2 pixels. At the end the model, one digit of each
kind that it was not trained on, and its card are written into the package.
"""

import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from regard.machine import describe_machine
from regard.models.vision_transformer import VisionConfig, VisionTransformer
from regard.weights.vision_weights import INCLUDED

FOLDER = INCLUDED["digits"]
SEED, HELD_OUT = 0, 297  # digits of the test, chosen at random
EPOCHS, BATCH, RATE, DECAY, WARM = 120, 125, 2e-3, 0.05, 0.05  # WARM: share of the steps in which the rate rises
GREYS, CELL = 16, 2  # levels of the data's pixels; pixels of a patch
NOISE = 0.1  # standard deviation of what is added to the pixels in training


class Digits(NamedTuple):
    """Images (n, 1, 16, 16) from -1 to 1, and what they show."""

    images: Tensor
    labels: Tensor


def main() -> None:
    """Train, measure, and write the model with its card."""
    torch.manual_seed(SEED)
    training, test = load_digits()
    model = VisionTransformer(VisionConfig())
    start = time.perf_counter()
    train(model, training)
    seconds = time.perf_counter() - start
    FOLDER.mkdir(exist_ok=True)
    model.save(FOLDER)
    model = VisionTransformer.load(FOLDER)  # as it is read again, from float16
    with torch.no_grad():
        right = model(test.images).argmax(-1) == test.labels
    write_examples(test, right)
    card = describe(model, training, test, int(right.sum()), seconds)
    (FOLDER / "README.md").write_text(card, encoding="utf-8")
    print(card)


def load_digits() -> tuple[Digits, Digits]:
    """Return the digits to train on and those of the test."""
    from sklearn import datasets  # type: ignore[import-untyped]

    found = datasets.load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / GREYS * 2 - 1
    images = pixels.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    test, training = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(images[training], labels[training]), Digits(images[test], labels[test])


def train(model: VisionTransformer, data: Digits) -> None:
    """Train on digits that are shifted by up to a patch, and noisy."""
    steps = EPOCHS * (len(data.labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=WARM)
    for step in range(steps):
        chosen = torch.randint(len(data.labels), (BATCH,))
        loss = F.cross_entropy(model(augment(data.images[chosen])), data.labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (steps // 10) == 0:
            print(f"step {step:,} of {steps:,}: loss {loss.item():.3f} nats", flush=True)


def augment(images: Tensor) -> Tensor:
    """Return images that are each shifted by up to one patch, with noise that is equal within a patch."""
    side = images.shape[-1]
    padded = F.pad(images, (CELL,) * 4, value=-1.0)
    down, right = CELL * torch.randint(3, (2, len(images)))
    rows, columns = (shift[:, None] + torch.arange(side) for shift in (down, right))
    shifted = padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]][:, None]
    noise = NOISE * torch.randn(len(images), 1, side // CELL, side // CELL)
    return shifted + noise.repeat_interleave(CELL, 2).repeat_interleave(CELL, 3)


def write_examples(test: Digits, right: Tensor) -> None:
    """Write the first digit of each kind that the model names, one pixel for each patch."""
    for digit in range(10):
        first = int(((test.labels == digit) & right).nonzero()[0])
        pixels = ((test.images[first, 0, ::CELL, ::CELL] + 1) / 2 * 255).round().numpy().astype(np.uint8)
        Image.fromarray(pixels).save(FOLDER / f"{digit}.png", optimize=True)


def describe(model: VisionTransformer, training: Digits, test: Digits, right: int, seconds: float) -> str:
    """Return the card of the model."""
    config, count = model.config, sum(parameter.numel() for parameter in model.parameters())
    return f"""# digits

A vision transformer of {config.num_hidden_layers} layers with {config.num_attention_heads} heads and {count:,} parameters, \
in float16: the example of `regard see`.

It reads a digit of 8 x 8 pixels, each of which is a patch of 2 x 2, white on black. It was trained on \
{len(training.labels):,} of the digits of scikit-learn, shifted by up to a pixel and noisy, and names {right} of the \
{len(test.labels)} others \
({right / len(test.labels):.1%}). The ten images beside this file are of those others.

Made by `python -m recipes.digits` in {seconds:.0f} s on {describe_machine(measure=False).processor}.

The digits are those of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998, UCI Machine Learning
Repository, CC BY 4.0), as scikit-learn ships them. The weights are under the license of regard, MIT.
"""


if __name__ == "__main__":
    main()
