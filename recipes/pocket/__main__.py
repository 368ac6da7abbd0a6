"""python -m recipes.pocket --data FOLDER: makes the pocket model from nothing. Steps that are done already are skipped.

FOLDER holds stories15M.bin and tokenizer.bin (https://huggingface.co/karpathy/tinyllamas, MIT), from which the stories are
sampled. Everything lies in runs/pocket: stories, corpus, run; lists, second; varied, third. At the end the model and its card
are written into the package.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from recipes.pocket import card, lists, stories
from regard.cli import main as regard
from regard.machine import measure_product_rate
from regard.text import BytePair
from regard.text.corpus import documents, prepare

CHUNKS = 13  # of stories; each about a million and a half tokens
VOCABULARY, VOCABULARY_CHUNKS = 2048, 2  # pieces, and the chunks that they are learned from
LIST_CHUNKS, LIST_EVERY = 2, 2  # the second run: the last chunks once more, with a list after every other story
VARIED_CHUNKS, VARIED_LIST_EVERY = range(CHUNKS, CHUNKS + 2), 4  # the third run: stories of several temperatures
VARIED_SAMPLING = {"temperatures": (0.7, 0.8, 0.9, 1.0), "top_k": 1000, "top_p": 1.0}
ROOT = Path("runs/pocket")


def main() -> None:
    """Make the stories, the vocabulary and the corpora, train three times, and write the card."""
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of stories15M.bin and tokenizer.bin")
    options = parser.parse_args()
    dtype = choose_dtype()
    folder = ROOT / "stories"
    stories.write_stories(options.data, folder, range(CHUNKS), dtype)
    if not (ROOT / "corpus").is_dir():
        files = [stories.get_chunk_path(folder, n) for n in range(VOCABULARY_CHUNKS)]
        text = BytePair.train((story for file in files for story in documents(file)), VOCABULARY)
        print(f"vocabulary: {text}", flush=True)
        print(prepare(stories.read_stories(folder, CHUNKS), text, ROOT / "corpus"), flush=True)
    train("pocket.toml", dtype)
    text = BytePair.load(ROOT / "run" / "model")
    prepare_missing(
        ROOT / "lists", lists.insert_lists(folder, text, range(CHUNKS - LIST_CHUNKS, CHUNKS), every=LIST_EVERY), text
    )
    train("heads.toml", dtype)
    stories.write_stories(options.data, folder, VARIED_CHUNKS, dtype, **VARIED_SAMPLING)
    prepare_missing(ROOT / "varied", lists.insert_lists(folder, text, VARIED_CHUNKS, every=VARIED_LIST_EVERY), text)
    train("temperatures.toml", dtype)
    card.write_card(ROOT)


def choose_dtype() -> torch.dtype:
    """Return the dtype in which this processor multiplies faster, bfloat16 or float32."""
    return max((torch.float32, torch.bfloat16), key=measure_product_rate)


def prepare_missing(folder: Path, texts: Iterable[str], text: BytePair) -> None:
    """Prepare a corpus, unless its folder exists."""
    if not folder.is_dir():
        print(prepare(texts, text, folder), flush=True)


def train(config: str, dtype: torch.dtype) -> None:
    """Train by one of the recipe's TOML files."""
    flags = ["--precision", str(dtype).removeprefix("torch.")]
    if regard(["train", "--config", str(Path(__file__).with_name(config)), *flags]):
        raise SystemExit("the training was stopped; the same command continues it")


if __name__ == "__main__":
    main()
