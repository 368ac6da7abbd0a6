"""Read and write regard's own translators: a folder of settings.json, with the kind and sizes, and model.safetensors.

A matrix may be stored as int8: whole numbers from -127 to 127 under its name, and a scale for each row under name.scale.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from regard.atomic_write import write_atomically
from regard.errors import ConfigError, WeightsError
from regard.weights import tensor_archives
from regard.weights.json_object import read_object, show_settings
from regard.weights.stored_tensor import REAL_DTYPES, StoredTensor
from regard.weights.tensor_archives import TensorArchive

SETTINGS, TENSORS = "settings.json", "model.safetensors"
LARGEST, DEEPEST = 1 << 20, 1000  # the largest size in the settings, and the most layers
TINY = torch.finfo(torch.float32).tiny
SCALE = ".scale"  # after the name of an int8 matrix: one number for each of its rows
INCLUDED_TRANSLATORS = {
    name: Path(__file__).parent / name for name in ("translator", "translator-plain")
}  # included in this package


class SavableTokenizer(Protocol):
    """A vocabulary that can be saved to a folder."""

    def save(self, folder: str | Path) -> None:
        """Write the files of the vocabulary into a folder."""


class TranslatorSettings(NamedTuple):
    """The settings of a translator: its kind, its constructor arguments, and its folder."""

    kind: str
    sizes: dict[str, Any]
    folder: Path


def read_settings(name: str | Path) -> TranslatorSettings:
    """Read the settings of a folder, or of a model included in the package, by name; raise WeightsError if there are none."""
    folder = find_folder(name)
    path = folder / SETTINGS
    stated = read_object(path)
    kind, sizes = stated.get("kind"), stated.get("sizes")
    if not isinstance(kind, str) or not isinstance(sizes, dict):
        raise WeightsError(f'{path}: "kind" must be a string and "sizes" an object; got {show_settings(stated)}.')
    wrong = {name: size for name, size in sizes.items() if is_invalid_size(name, size)}
    if wrong:
        raise WeightsError(
            f"{path}: a size must be a string or a number of at most {LARGEST:,}, {DEEPEST:,} for layers; "
            f"got {show_settings(wrong)}."
        )
    return TranslatorSettings(kind, sizes, folder)


def is_invalid_size(name: str, size: object) -> bool:
    """Return whether a size is invalid: creating a model of it would exhaust time or memory before its tensors are read."""
    most = DEEPEST if name == "layers" else LARGEST
    return isinstance(size, dict | list) or (isinstance(size, int | float) and not size <= most)


def find_folder(name: str | Path) -> Path:
    """Return the folder of a path or of the name of an included translator."""
    path = Path(name).expanduser()
    included_folder = INCLUDED_TRANSLATORS.get(str(name))
    if path.is_dir() or included_folder is None:
        if not (path / SETTINGS).is_file():
            raise WeightsError(
                f"{path} has no {SETTINGS} and is not a translator's name: the names are {', '.join(INCLUDED_TRANSLATORS)}."
            )
        return path
    if not included_folder.is_dir():
        raise WeightsError(f"the translator {name!r} is not in this package; train one with: regard translate --train.")
    return included_folder


def fill_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights in a folder into a model's tensors, which must be the same and of the same shapes."""
    archive = open_checked_archive(folder, tensors)
    for name, tensor in tensors.items():
        stored = archive.tensors[name]
        if stored.dtype == torch.int8:
            tensor.copy_(dequantize_matrix(stored, archive.tensors[name + SCALE]))
        else:
            stored.copy_into([tensor])


def open_checked_archive(folder: Path, tensors: Mapping[str, Tensor]) -> TensorArchive:
    """Return the archive of a folder without reading tensors; raise WeightsError unless names and shapes are the model's."""
    archive = tensor_archives.open_archive(folder / TENSORS)
    check_names_and_shapes(archive, tensors)
    return archive


def dequantize_matrix(stored: StoredTensor, scale: StoredTensor) -> Tensor:
    """Return an int8 matrix in float32: each row times its scale."""
    values, scales = stored.load(), scale.load().float()
    wrong = (~(scales.isfinite() & (scales >= 0))).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise WeightsError(f"{scale} must be finite and not below 0; row {row}, counted from 0, has {float(scales[row]):g}.")
    return values * scales.unsqueeze(-1)


def check_names_and_shapes(archive: TensorArchive, tensors: Mapping[str, Tensor]) -> None:
    """Raise WeightsError, naming the first one, if the tensors of a file are not those of the model."""
    wanted_shapes = {}
    for name, tensor in tensors.items():
        wanted_shapes[name] = tuple(tensor.shape)
        if tensor.dim() == 2 and name in archive.tensors and archive.tensors[name].dtype == torch.int8:
            wanted_shapes[name + SCALE] = (len(tensor),)
    for name, shape in wanted_shapes.items():
        if name not in archive.tensors:
            raise WeightsError(f"{archive.path} has no {name}, which {describe_requirement(name, wanted_shapes)} requires.")
        stored = archive.tensors[name]
        if stored.shape != shape:
            required = describe_requirement(name, wanted_shapes)
            raise WeightsError(f"{stored} must have the shape {shape}, as {required} requires; it has {stored.shape}.")
        if stored.dtype not in REAL_DTYPES and name + SCALE not in wanted_shapes:
            raise WeightsError(f"{stored} holds {stored.dtype}; weights must be one of {', '.join(map(str, REAL_DTYPES))}.")
    strange = next((name for name in archive.tensors if name not in wanted_shapes), None)
    if strange is not None:
        raise WeightsError(f"{archive.tensors[strange]} is not part of the model that its {SETTINGS} describes.")


def describe_requirement(name: str, wanted_shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return what requires a tensor: the settings or, for a scale, the int8 matrix."""
    matrix = name.removesuffix(SCALE)
    return f"its {SETTINGS}" if matrix == name or matrix not in wanted_shapes else f"the int8 matrix {matrix}"


def save_translator(
    folder: str | Path,
    kind: str,
    sizes: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    text: SavableTokenizer | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a translator's folder: the weights, the settings and a vocabulary; none if it fails.

    dtype is the dtype of the stored weights, by default their own. torch.int8 applies to matrices only, with a scale for each
    row: the error of a number is at most half of the scale, 1/254 of the largest number in its row.
    """
    if dtype not in (None, torch.int8, *REAL_DTYPES):
        raise ConfigError(f"dtype must be torch.int8, {', '.join(map(str, REAL_DTYPES))} or None; got {dtype!r}.")
    folder = Path(folder)
    named = {
        key: part for name, tensor in tensors.items() for key, part in convert_for_storage(name, tensor.detach(), dtype).items()
    }
    stated = json.dumps({"kind": kind, "sizes": {**sizes}}, indent=2)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        vocabulary = {} if text is None else read_vocabulary_files(text)
        places = [folder / name for name in (TENSORS, SETTINGS, *vocabulary)]
        with write_atomically(*places) as (weights, settings, *vocabulary_files):
            save_file(named, weights, {"format": "pt"})
            settings.write_text(stated + "\n", encoding="utf-8")
            for path in vocabulary_files:
                path.write_bytes(vocabulary[path.name])
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"the translator could not be written to {folder}: {error}.") from error


def read_vocabulary_files(text: SavableTokenizer) -> dict[str, bytes]:
    """Return the content of each file that a vocabulary is saved to, by name."""
    with TemporaryDirectory() as folder:
        text.save(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def convert_for_storage(name: str, tensor: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors to store for a tensor: the tensor itself, or its int8 values and scales."""
    if dtype != torch.int8:
        return {name: tensor.to(dtype or tensor.dtype).contiguous()}
    if tensor.dim() != 2:
        return {name: tensor.contiguous()}  # biases and norm weights are few, and each affects many numbers
    if not tensor.isfinite().all():
        raise WeightsError(f"{name} holds a number that is not finite, which torch.int8 cannot hold.")
    tensor = tensor.float()
    scales = tensor.abs().amax(-1) / 127
    values = (tensor / scales.clamp_min(TINY).unsqueeze(-1)).round_().to(torch.int8)
    return {name: values, name + SCALE: scales}
