"""A small model with a vocabulary of letters, its texts, and a process that builds its atlas."""

import json
import sys
from pathlib import Path

import torch

from regard import GPT2, GPT2Config
from regard.text import Letters

TEXT = "the cat sat on the mat and the dog sat on the log. "
SETTINGS = {"tokens": 48, "queries": 16, "examples": 2, "shard_size": 2}


def make_texts(count: int = 9) -> list[str]:
    return [(TEXT[n:] + TEXT[:n]) * 2 for n in range(count)]


def make_model(more: str = "") -> GPT2:
    torch.manual_seed(0)
    text = Letters.from_texts([more, *make_texts()])
    model = GPT2(GPT2Config(layers=2, heads=2, width=8, context=64, vocabulary=text.vocabulary)).eval()
    model.text = text
    return model


def read_results(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of an atlas, but for its lock."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".atlas.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


if __name__ == "__main__":
    from regard import atlas

    torch.set_num_threads(1)
    folder, settings = sys.argv[1], json.loads(sys.argv[2])
    model = GPT2.load(sys.argv[3])
    atlas(model, Path(sys.argv[4]), folder, **{**SETTINGS, **settings})
