"""The pictures of the README and of these pages, drawn again: `python docs/pictures/draw.py`."""

from pathlib import Path

import matplotlib as mpl

from regard import Causal, attend
from regard.lectures import figures
from regard.lectures.recompute import trainable
from regard.show import figure

FOLDER = Path(__file__).parent


def main() -> None:
    """Draws them."""
    mpl.rcParams["svg.hashsalt"] = "regard"  # the same names in the file each time
    words, x = figures.sentence("journey")
    steps = attend(*trainable().project(x), Causal())
    figure.steps(steps, words).savefig(FOLDER / "steps.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
