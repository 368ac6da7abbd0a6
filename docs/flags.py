"""The flags that are fields of a Python class: `python -m docs.flags` writes them into regard/cli/arguments/derived.json.

`regard COMMAND --help` reads them there, because importing the classes imports PyTorch.
"""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from regard.atomic_write import write_atomically
from regard.cli import train, translate
from regard.cli.arguments import derived
from regard.cli.arguments.generate import FLAGS
from regard.cli.walk_translation import SENTENCE
from regard.generate import Settings
from regard.lectures.examples import EXAMPLES
from regard.models import GPT2Config
from regard.models.translator import KINDS
from regard.observe.recorded_runs import run
from regard.train import TrainConfig
from regard.train.config import DEFAULT_MODEL
from regard.train.translator_sizes import list_arguments

NAMES = {tuple[float, float]: "floats", tuple[str, ...]: "strings"}


def derive() -> dict[str, Any]:
    """The flags of each command, as JSON holds them."""
    found = {
        "generate": {name: getattr(Settings, name) for name in FLAGS},
        "look": {"kinds": (*run.KINDS, run.IMPLICIT)},
        "walk": {"examples": list(EXAMPLES), "sentence": SENTENCE},
        "train": [*list_settings(), *list_sizes()],
        "translate": [*list_settings_of_pairs(), *list_sizes_of_translators()],
    }
    return json.loads(json.dumps(found))


def describe(name: str, kind: Any, default: Any, says: str) -> dict[str, Any]:
    """One flag: the name of its field, what it takes, its default and its meaning."""
    return {"name": name, "kind": NAMES.get(kind) or kind.__name__, "default": default, "says": says}


def list_settings() -> Iterator[dict[str, Any]]:
    """Every setting of a training run but its model."""
    hints = get_type_hints(TrainConfig)
    for one in fields(TrainConfig):
        if one.name not in ("model", "observe_every"):
            yield describe(one.name, hints[one.name], one.default, one.metadata["says"])


def list_sizes() -> Iterator[dict[str, Any]]:
    """Every size of a GPT-2."""
    hints = get_type_hints(GPT2Config)
    for one in fields(GPT2Config):
        if one.name in train.SIZES:
            default = DEFAULT_MODEL.get(one.name, one.default)
            yield describe(one.name, hints[one.name], None if default is MISSING else default, train.SIZES[one.name])


def list_settings_of_pairs() -> Iterator[dict[str, Any]]:
    """Every setting of a run of a translator."""
    hints = get_type_hints(TrainConfig)
    for one in fields(TrainConfig):
        if one.name in translate.FIELDS:
            default = translate.DEFAULTS.get(one.name, one.default)
            yield describe(one.name, hints[one.name], default, one.metadata["says"])


def list_sizes_of_translators() -> Iterator[dict[str, Any]]:
    """Every size of a translator."""
    kinds = {"kind": (str, None)} | {name: kind for each in KINDS for name, kind in list_arguments(each).items()}
    for name, says in translate.SIZES.items():
        kind, default = kinds[name]
        yield describe(name, kind, translate.DEFAULTS["model"].get(name, default), says)


def main() -> None:
    """Write the file."""
    with write_atomically(Path(derived.FILE)) as (beside,):
        beside.write_text(json.dumps(derive(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
