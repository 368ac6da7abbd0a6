"""The files that hold a model's tensors, one or several, safetensors, pickles or NumPy's, as tensors that are not yet read."""

import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from safetensors import safe_open

from regard.errors import RegardError, WeightsError
from regard.weights import pickles, tensorflow
from regard.weights.json_object import read_weight_map
from regard.weights.storages import list_records
from regard.weights.stored import Stored, held, matrix, part_of, reason_of

INDEX = ".index.json"  # says which of several files holds a tensor
SINGLE = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,  # weights with a scale beside them alone
}
NUMPY = {"<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16}
Tensors = dict[str, Stored]


@dataclass(frozen=True, eq=False)
class Archive:
    """The tensors of a model by the names they have there, where they lie, and what the file says beside them."""

    path: Path
    tensors: Tensors
    says: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Where a config and a vocabulary may lie."""
        return self.path if self.path.is_dir() else self.path.parent


def opened(path: Path) -> Archive:
    """The archive at a path, a folder or a file; WeightsError where there is none, or where it is damaged."""
    file = chosen(path) if path.is_dir() else path
    says: Mapping[str, Any] = {}
    try:
        if file.is_dir():
            tensors = tensorflow.read(file)
        elif file.suffix in pickles.ENDINGS:
            tensors, says = pickles.read(file)
        elif file.name.endswith(INDEX):
            tensors = together(file)
        else:
            tensors = reader(file)(file)
    except RegardError:
        raise
    except Exception as error:  # a damaged file makes its parser raise anything
        raise WeightsError(f"{file} is damaged, or not what its name says: {reason_of(error)}.") from None
    return Archive(path, tensors, says)


def chosen(folder: Path) -> Path:
    """The file of a folder that holds the model, or the folder itself where that is a TensorFlow checkpoint."""
    for name in SINGLE:
        if (folder / name).is_file():
            return folder / name
    if tensorflow.is_checkpoint(folder):
        return folder
    found = sorted(file for file in folder.iterdir() if file.suffix in KINDS)
    if len(found) == 1:
        return found[0]
    raise WeightsError(
        f"{folder} must hold {SINGLE[0]}, {SINGLE[2]}, a TensorFlow checkpoint, or one file of the kinds {', '.join(KINDS)}; "
        f"it holds {', '.join(file.name for file in found) or 'none of these'}."
    )


def reader(file: Path) -> Callable[[Path], Tensors]:
    """What reads a file of tensors alone, by its ending."""
    if file.suffix not in READERS:
        raise WeightsError(f"{file} ends in {file.suffix or 'nothing'}; regard reads {', '.join(KINDS)}.")
    return READERS[file.suffix]


def together(index: Path) -> Tensors:
    """The tensors of several files, by the index that says which file holds which."""
    places = read_weight_map(index)
    files = {}
    for file in sorted(set(places.values())):
        path = index.parent / file
        if path.name != file or not path.is_file():
            raise WeightsError(f"{index} names {file!r}, which is no file beside it.")
        files[file] = pickles.read(path)[0] if path.suffix in pickles.ENDINGS else reader(path)(path)
    for name, file in places.items():
        if name not in files[file]:
            raise WeightsError(f"{index.parent / file} has no {name}, which {index.name} says it holds.")
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    strange = next((name for name in found if name not in places), None)
    if strange is not None:
        raise WeightsError(f"{found[strange]} is not in {index.name}.")
    return {name: files[file][name] for name, file in places.items()}


def read_safetensors(path: Path) -> Tensors:
    """The tensors of a .safetensors file."""
    with safe_open(path, framework="pt"):  # checks the header, and that the tensors are all of the file
        pass
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(
            path,
            name,
            tuple(entry["shape"]),
            SAFETENSORS.get(entry["dtype"], entry["dtype"]),
            part_of(path, 8 + length + entry["data_offsets"][0]),
        )
        for name, entry in header.items()
    }


def read_npz(path: Path) -> Tensors:
    """The arrays of a .npz file, compressed or not; their checksums are the archive's own."""
    archive = zipfile.ZipFile(path)  # stays open for the arrays
    return {name.removesuffix(".npy"): array(path, archive, info) for name, info in list_records(archive).items()}


def array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Stored:
    """An array of an archive; WeightsError where it has more or fewer numbers than its shape says."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as file:
        shape, fortran, dtype = header_of(file)
        count = (info.file_size - file.tell()) / max(dtype.itemsize, 1)
    if count != prod(shape):
        raise WeightsError(f"{path}: {name} has the shape {shape}, and {count:g} numbers.")
    way: Callable[[], BufferedIOBase] = partial(inside, archive, info)
    if fortran:
        way = held(lambda: torch.from_numpy(np.load(path, allow_pickle=False)[name]))
    return Stored(path, name, matrix(shape), NUMPY.get(dtype.str, str(dtype)), way)


def header_of(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape, the order and the dtype of an array; the file then stands at its first number."""
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about how the file was written
        shape, fortran, dtype = read_header(file)
    return shape, fortran, dtype


def inside(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> BufferedIOBase:
    """An array's numbers inside an archive, checked against the archive's checksum as they are read."""
    file = archive.open(info)
    header_of(file)
    return cast(BufferedIOBase, file)


READERS: dict[str, Callable[[Path], Tensors]] = {".safetensors": read_safetensors, ".npz": read_npz}
KINDS = (*READERS, *pickles.ENDINGS)
