"""Translators of this house: a folder of settings.json, which kind it is and its sizes, and model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import WeightsError
from regard.weights import archives
from regard.weights.archives import Archive
from regard.weights.stored import REAL
from regard.writing import whole

SETTINGS, TENSORS = "settings.json", "model.safetensors"
CARRIED = {name: Path(__file__).parent / name for name in ("translator", "translator-plain")}  # in this package


class Text(Protocol):
    """A vocabulary that writes itself into a folder."""

    def save(self, folder: str | Path) -> None:
        """Its files, beside the others."""


class Settings(NamedTuple):
    """What a folder says: the kind of model, the arguments that make it, and where it lies."""

    kind: str
    sizes: dict[str, Any]
    folder: Path


def read(name: str | Path) -> Settings:
    """The settings of a folder, or of a model that is carried here by its name; WeightsError where there are none."""
    folder = place(name)
    path = folder / SETTINGS
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        kind, sizes = said["kind"], said["sizes"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise WeightsError(f'{path} must be a JSON object of "kind" and "sizes": {type(error).__name__}: {error}.') from None
    if not isinstance(kind, str) or not isinstance(sizes, dict):
        raise WeightsError(f'{path}: "kind" must be a word and "sizes" an object; got {kind!r} and {sizes!r}.')
    return Settings(kind, sizes, folder)


def place(name: str | Path) -> Path:
    """The folder of this path or name."""
    path = Path(name).expanduser()
    carried = CARRIED.get(str(name))
    if path.is_dir() or carried is None:
        if not (path / SETTINGS).is_file():
            raise WeightsError(f"{path} has no {SETTINGS}, and is no translator's name: those are {', '.join(CARRIED)}.")
        return path
    if not carried.is_dir():
        raise WeightsError(f"the translator {name!r} is not in this package; train one with: regard translate --train.")
    return carried


def fill(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copies the numbers of a folder into a model's tensors, which must be all there are, and of their shapes."""
    archive = archives.opened(folder / TENSORS)
    refuse_others(archive, tensors)
    for name, tensor in tensors.items():
        archive.tensors[name].fill([tensor])


def refuse_others(archive: Archive, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightsError where the tensors of a file are not those of the model, naming the first."""
    for name, tensor in tensors.items():
        if name not in archive.tensors:
            raise WeightsError(f"{archive.path} has no {name}, which its {SETTINGS} asks for.")
        stored = archive.tensors[name]
        if stored.shape != tuple(tensor.shape):
            raise WeightsError(
                f"{stored} must have the shape {tuple(tensor.shape)}, as its {SETTINGS} says; it has {stored.shape}."
            )
        if stored.dtype not in REAL:
            raise WeightsError(f"{stored} holds {stored.dtype}, and weights are one of {', '.join(map(str, REAL))}.")
    strange = next((name for name in archive.tensors if name not in tensors), None)
    if strange is not None:
        raise WeightsError(f"{archive.tensors[strange]} is no part of the model that its {SETTINGS} describes.")


def save(folder: str | Path, kind: str, sizes: Mapping[str, Any], tensors: Mapping[str, Tensor], text: Text | None) -> None:
    """Writes the folder, each file whole or not there: the text first, without which the numbers mean nothing."""
    folder = Path(folder)
    if text is not None:
        text.save(folder)
    said = json.dumps({"kind": kind, "sizes": {**sizes}}, indent=2)
    named = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / TENSORS, folder / SETTINGS) as (weights, settings):
            save_file(named, weights, {"format": "pt"})
            settings.write_text(said + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the translator could not be written to {folder}: {error}.") from error
