"""The files of a checkpoint: run.json, the state of a run, with a checksum of itself and of each file beside it.

    {"format": "regard training", "version": 2, "step": 200, ..., "files": {NAME: [bytes, CRC-32]}, "checksum": CRC-32}

The checksum covers everything else, as JSON with sorted keys. Version 1 had none. `.metadata`, which
torch writes, is a pickle, which could run any code: only known classes are unpickled.
"""

import json
import math
import os
import pickle
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from zlib_ng.zlib_ng import crc32

from regard.errors import DataError

FORMAT, VERSION = "regard training", 2
HEADER_NAME, METADATA_NAME = "run.json", ".metadata"
LARGEST = 1 << 26  # bytes of a run.json; a usual one has a few thousand
FOLDER_PATTERN = re.compile(r"step-(\d{8,18})")
CHECKPOINT_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
CHECKPOINT_CLASSES = {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"}
CHECKPOINT_CLASSES |= {"BytesStorageMetadata", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING"}
OTHER_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}


def write_header(folder: Path, says: Mapping[str, Any]) -> None:
    """Write run.json beside the files of a checkpoint, and flush it to disk."""
    files = {path.name: checksum_file(path) for path in folder.iterdir()}
    header = add_checksum({"format": FORMAT, "version": VERSION, **says, "files": files})
    with (folder / HEADER_NAME).open("w", encoding="utf-8") as file:
        json.dump(header, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_header(folder: Path) -> dict[str, Any]:
    """Read run.json; raise DataError if it is not what was written."""
    path = folder / HEADER_NAME
    says = read_json(path)
    if says.get("format") != FORMAT:
        raise DataError(f"{path} is not what regard writes into a checkpoint.")
    if not is_count(says.get("version")):
        raise make_damage_error(path, f"version must be a whole number; got {says.get('version')!r}")
    if says["version"] > VERSION:
        raise DataError(f"{path} has version {says['version']}, and this regard reads up to {VERSION}: update regard.")
    if says["version"] > 1 or "checksum" in says:
        expected, found = says.get("checksum"), compute_checksum(says)
        if expected != found:
            raise make_damage_error(path, f"its checksum is {found}, and {expected!r} was written")
    check_step(path, says)
    check_file_table(path, says)
    return says


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        says = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path.parent} is not a checkpoint: it has no {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise make_damage_error(path, str(error)) from None
    if not isinstance(says, dict):
        raise DataError(f"{path} is not what regard writes into a checkpoint.")
    return says


def check_step(path: Path, says: Mapping[str, Any]) -> None:
    """Raise DataError if the step is invalid or not that of the folder, or the held-out loss is not a number."""
    if not is_count(step := says.get("step")):
        raise make_damage_error(path, f"step must be a whole number of at least 0; got {step!r}")
    loss: Any = says.get("held_out_nats")
    if path.parent.name != make_folder_name(says["step"]):
        raise make_damage_error(path, f"step is {step}, but the folder is {path.parent.name}")
    if loss is not None and not is_number(loss):
        raise make_damage_error(path, f"held_out_nats must be a number; got {loss!r}")


def check_file_table(path: Path, says: Mapping[str, Any]) -> None:
    """Raise DataError unless every file of the checkpoint is listed, is in its folder, and has a length and a checksum."""
    files = says.get("files")
    if not isinstance(files, dict) or METADATA_NAME not in files:
        raise make_damage_error(path, f"files must name {METADATA_NAME} and the files of tensors; got {files!r}")
    for name, sums in files.items():
        if Path(name).name != name or name in ("", "..", HEADER_NAME):
            raise make_damage_error(path, f"files must name files of this folder; got {name!r}")
        if not isinstance(sums, list) or len(sums) != 2 or not all(map(is_count, sums)):
            raise make_damage_error(path, f"files must give the length and the checksum of {name}; got {sums!r}")
    unnamed = sorted({one.name for one in path.parent.glob("*.distcp")} - files.keys())
    if unnamed:
        raise make_damage_error(path, f"it does not name {unnamed[0]}, which is in the same folder")


def verify_checkpoint_files(folder: Path, says: Mapping[str, Any], former: Path | None) -> None:
    """Raise DataError if a file of a checkpoint is missing or altered; former is the checkpoint before it."""
    for name, expected in says["files"].items():
        path = folder / name
        came = checksum_file(path) if path.is_file() else None
        if came != expected:
            what = "is missing" if came is None else f"is damaged: it has {came[0]:,} bytes of {expected[0]:,}, or others"
            instead = "the run starts over" if former is None else f"the run resumes from {former.name}"
            raise DataError(f"{path} {what}. Without the folder {folder}, {instead}.")


def add_checksum(says: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a header with its checksum."""
    return {**says, "checksum": compute_checksum(says)}


def compute_checksum(says: Mapping[str, Any]) -> int:
    """Compute the CRC-32 of the content of a header without its checksum."""
    rest = {name: value for name, value in says.items() if name != "checksum"}
    return crc32(json.dumps(rest, sort_keys=True).encode())


def checksum_file(path: Path) -> list[int]:
    """Return the length of a file and its CRC-32."""
    length = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            length, crc = length + len(block), crc32(block, crc)
    return [length, crc]


def list_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run by step, the oldest first."""
    found = ((FOLDER_PATTERN.fullmatch(path.name), path) for path in folder.glob("step-*") if path.is_dir())
    return [path for _, path in sorted((int(name[1]), path) for name, path in found if name is not None)]


def make_folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: Any) -> bool:
    """Return whether a value is a number, finite or not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_finite(values: Iterable[Any]) -> bool:
    """Return whether all values are finite numbers."""
    return all(is_number(value) and math.isfinite(value) for value in values)


def make_damage_error(path: Path, why: str) -> DataError:
    """Return the error for a run.json that is not what was written."""
    return DataError(
        f"{path} is damaged or altered: {why}. Without the folder {path.parent}, the run resumes from the checkpoint before it."
    )


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes that a checkpoint's .metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of a name in the pickle; raise UnpicklingError unless it is allowed."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (dtype or (module, name) in OTHER_NAMES or (module in CHECKPOINT_MODULES and name in CHECKPOINT_CLASSES)):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_metadata(path: Path, files: Collection[str]) -> None:
    """Raise DataError for a file that is not the .metadata of a checkpoint, or whose tensors are stored in other files."""
    try:
        with path.open("rb") as file:
            found = MetadataUnpickler(file).load()
        places = {place.relative_path for place in found.storage_data.values()}
        if not places <= set(files):
            raise ValueError(f"its tensors lie in {min(places - set(files))}, which the checkpoint does not have")
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path} is not what training writes: {str(error) or type(error).__name__}.") from None
