"""Open the files of a model's tensors, one or several, safetensors, pickles or NumPy's, without reading the tensors."""

import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from regard.errors import RegardError, WeightsError
from regard.weights import pickles, tensorflow
from regard.weights.json_object import read_weight_map
from regard.weights.stored_tensor import StoredTensor, describe_error, drop_leading_axis, read_numbers

INDEX = ".index.json"  # names the file of each tensor
MODEL_FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,  # only weights with a scale
}
NUMPY = {"<f8": torch.float64, "<f4": torch.float32, "<f2": torch.float16}
Tensors = dict[str, StoredTensor]


@dataclass(frozen=True, eq=False)
class TensorArchive:
    """The tensors of a model by their names in the file, the path, and the settings stored with them."""

    path: Path
    tensors: Tensors
    says: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder that may contain a config and a vocabulary."""
        return self.path if self.path.is_dir() else self.path.parent


def open_archive(path: Path) -> TensorArchive:
    """Open the archive in a folder or file; raise WeightsError if there is none or it is damaged."""
    file = find_model_file(path) if path.is_dir() else path
    says: Mapping[str, Any] = {}
    try:
        if file.is_dir():
            tensors = tensorflow.read_checkpoint(file)
        elif file.suffix in pickles.ENDINGS:
            tensors, says = pickles.read_pickle(file)
        elif file.name.endswith(INDEX):
            tensors = read_indexed_files(file)
        else:
            tensors = choose_reader(file)(file)
    except RegardError:
        raise
    except Exception as error:  # the parser of a damaged file may raise anything
        raise WeightsError(f"{file} is damaged or not in the format of its suffix: {describe_error(error)}.") from None
    return TensorArchive(path, tensors, says)


def find_model_file(folder: Path) -> Path:
    """Return the file of a folder that holds the model, or the folder itself if it is a TensorFlow checkpoint."""
    for name in MODEL_FILES:
        if (folder / name).is_file():
            return folder / name
    if tensorflow.is_checkpoint(folder):
        return folder
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    if len(found) == 1:
        return found[0]
    inner = [one for one in sorted(folder.iterdir()) if any((one / name).is_file() for name in MODEL_FILES)]
    raise WeightsError(
        f"{folder} must hold {MODEL_FILES[0]}, {MODEL_FILES[2]}, a TensorFlow checkpoint, or one file of the "
        f"kinds {', '.join(SUFFIXES)}; "
        f"it holds {', '.join(file.name for file in found) or 'none of these'}."
        + (f" There is a model in {', '.join(map(str, inner[:3]))}." if inner else "")
    )


def choose_reader(file: Path) -> Callable[[Path], Tensors]:
    """Return the reader of a tensor file by its suffix."""
    if file.suffix not in READERS:
        raise WeightsError(f"{file} ends in {file.suffix or 'nothing'}; regard reads {', '.join(SUFFIXES)}.")
    return READERS[file.suffix]


def read_indexed_files(index: Path) -> Tensors:
    """Return the tensors of several files, by the index that maps tensors to files."""
    places = read_weight_map(index)
    files = {}
    for file in sorted(set(places.values())):
        path = index.parent / file
        if path.name != file or not path.is_file():
            raise WeightsError(f"{index} names {file!r}, which is not a file in the same folder.")
        files[file] = pickles.read_pickle(path)[0] if path.suffix in pickles.ENDINGS else choose_reader(path)(path)
    for name, file in places.items():
        if name not in files[file]:
            raise WeightsError(f"{index.parent / file} has no {name}, which {index.name} lists in it.")
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    strange = next((name for name in found if name not in places), None)
    if strange is not None:
        raise WeightsError(f"{found[strange]} is not in {index.name}.")
    return {name: files[file][name] for name, file in places.items()}


def read_safetensors(path: Path) -> Tensors:
    """Return the tensors of a .safetensors file."""
    with safe_open(path, framework="pt"):  # checks the header, and that the tensors cover the whole file
        pass
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), SAFETENSORS.get(entry["dtype"], entry["dtype"])
        read = partial(read_numbers, path, 8 + length + entry["data_offsets"][0], shape, dtype)
        found[name] = StoredTensor(path, name, shape, dtype, read)
    return found


def read_npz(path: Path) -> Tensors:
    """Return the arrays of a .npz file, compressed or not; they are verified by the archive's own checksums."""
    archive = zipfile.ZipFile(path)  # stays open to read the arrays
    return {info.filename.removesuffix(".npy"): describe_array(path, archive, info) for info in archive.infolist()}


def describe_array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> StoredTensor:
    """Return an array of an archive; raise WeightsError if the number of elements does not match its shape."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as file:
        shape, dtype = read_array_header(file)
        count = (info.file_size - file.tell()) / max(dtype.itemsize, 1)
    if count != prod(shape):
        raise WeightsError(f"{path}: {name} has the shape {shape} but holds {count:g} numbers.")
    read = partial(read_array, archive, info)
    return StoredTensor(path, name, drop_leading_axis(shape), NUMPY.get(dtype.str, str(dtype)), read)


def read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Tensor:
    """Read an array of an archive, verified against the archive's checksum."""
    with archive.open(info) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how the file was written
        return torch.from_numpy(np.lib.format.read_array(file, allow_pickle=False))


def read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and the dtype of an array; the file is then at its first number."""
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how the file was written
        shape, _, dtype = read_header(file)
    return shape, dtype


READERS: dict[str, Callable[[Path], Tensors]] = {".safetensors": read_safetensors, ".npz": read_npz}
SUFFIXES = (*READERS, *pickles.ENDINGS)
