"""python -m recipes.atlas smollm2 --data FOLDER: the atlas of a model over about a million tokens, into runs/atlas/MODEL.

FOLDER holds, in subfolders or not, what the corpus is made of. For smollm2: tinyshakespeare.txt and the-verdict.txt (public
domain), wiki.test.raw and wiki.valid.raw of WikiText-2 (CC BY-SA 3.0). The same command continues an atlas that was stopped.
Further arguments are those of regard atlas, such as --shard 0/2.
"""

import argparse
from pathlib import Path

from recipes.atlas.corpus import write_corpus
from regard.cli import main as regard

ROOT = Path("runs/atlas")


def main() -> None:
    """Write the corpus and compute the atlas."""
    parser = argparse.ArgumentParser(prog="python -m recipes.atlas", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=("smollm2",))
    parser.add_argument("--data", type=Path, required=True, help="the folder of the texts")
    options, further = parser.parse_known_args()
    corpus = ROOT / "texts"
    write_corpus(options.data, corpus)
    command = ["atlas", "--model", options.model, "--on", str(corpus), "--out", str(ROOT / options.model), *further]
    raise SystemExit(regard(command))


if __name__ == "__main__":
    main()
