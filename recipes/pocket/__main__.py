"""python -m recipes.pocket --data FOLDER: the pocket model from its corpus on. Whatever is done already is left as it is.

FOLDER holds stories15M.bin and tokenizer.bin (https://huggingface.co/karpathy/tinyllamas, MIT), which tell the stories. What is
made lies in runs/pocket: stories, corpus, run, then mixed and second; at the end the model and its card go into the package.
"""

import argparse
from pathlib import Path

from recipes.pocket import card, lists, stories
from regard.cli import main as regard
from regard.text import BytePair
from regard.text.corpus import documents, prepare

CHUNKS = 13  # of stories; each about a million and a half tokens
VOCABULARY, READ = 2048, 2  # pieces, and how many chunks they are learned from
AGAIN = 2  # of the chunks, the last ones, are read once more, with lists between
ROOT = Path("runs/pocket")


def main() -> None:
    """Stories, vocabulary, corpus, training; stories and lists, training; card."""
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of stories15M.bin and tokenizer.bin")
    options = parser.parse_args()
    stories.write(options.data, ROOT / "stories", range(CHUNKS))
    if not (ROOT / "corpus").is_dir():
        read = [stories.place(ROOT / "stories", n) for n in range(READ)]
        text = BytePair.train((story for file in read for story in documents(file)), VOCABULARY)
        print(f"vocabulary: {text}", flush=True)
        print(prepare(stories.told(ROOT / "stories", CHUNKS), text, ROOT / "corpus"), flush=True)
    train("pocket.toml")
    if not (ROOT / "mixed").is_dir():
        text = BytePair.load(ROOT / "run" / "model")
        print(prepare(lists.mixed(ROOT / "stories", text, range(CHUNKS - AGAIN, CHUNKS)), text, ROOT / "mixed"), flush=True)
    train("heads.toml")
    card.write(ROOT)


def train(config: str) -> None:
    """One of the two runs."""
    if regard(["train", "--config", str(Path(__file__).with_name(config))]):
        raise SystemExit("the training was stopped; the same command goes on")


if __name__ == "__main__":
    main()
