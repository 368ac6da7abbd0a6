"""Two translators into the package: the one with additive attention, the one without; in bytes, each with its card.

A card is measured of the file that is carried, and not of the numbers it was made from.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from recipes.lineage import card
from recipes.lineage.runs import Run, done
from regard.atomic_write import write_atomically
from regard.models import translator
from regard.weights.translator_weights import INCLUDED_TRANSLATORS

MODELS = {"translator": Run("additive", "joined"), "translator-plain": Run("plain", "joined")}
PACKAGE = INCLUDED_TRANSLATORS["translator"].parent
MOST = 6_000_000  # bytes of all of them together


def write(root: Path, into: Path = PACKAGE, models: Mapping[str, Run] = MODELS) -> None:
    """A folder for each name, every file of all of them whole or not there. SystemExit where a run is not done."""
    for run in models.values():
        if not done(run, root):
            again = f"python -m recipes.lineage --data FOLDER --only {run.name}"
            raise SystemExit(f"{root / run.name} has not all of its steps: {again} takes them.")
    with TemporaryDirectory() as beside:
        for name, run in models.items():
            translator.load(root / run.name / "model").save(Path(beside) / name, torch.int8)
        for name, run in models.items():
            (Path(beside) / name / "README.md").write_text(card.of(name, run, Path(beside) / name, root), encoding="utf-8")
        files = [file.relative_to(beside) for file in sorted(Path(beside).glob("*/*"))]
        size = sum((Path(beside) / file).stat().st_size for file in files)
        if size > MOST:
            raise SystemExit(f"the translators have {size:,} bytes together, and at most {MOST:,} are carried.")
        for name in models:
            (into / name).mkdir(parents=True, exist_ok=True)
        with write_atomically(*(into / file for file in files)) as places:
            for file, place in zip(files, places, strict=True):
                shutil.copyfile(Path(beside) / file, place)  # which anyone may read, as the file of a package must be
    print(f"{', '.join(models)}: {size:,} bytes in {into}")
