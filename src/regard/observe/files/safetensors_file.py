"""The file of a recording: safetensors with a JSON header and checksums, memory-mapped if large, never a pickle."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from regard.atomic_write import describe_failed_write, write_atomically
from regard.errors import DataError
from regard.observe.files.checksums import compute_checksums, compute_header_checksum, find_altered_tensor

# 2 adds additive scores and words of each axis; 3 checksums; 4 maps without a softmax; 5 biases by their diagonals; 6 those of
# products with distances; 7 those of groups of keys; 8 those of offsets on a grid
FORMAT, VERSION = "regard recording", 8
HEADER, SUMS, SUM = "recording", "checksums", "checksum"  # metadata: our header, checksums of tensors, of the rest
MOST_READ_BYTES = 2**28  # of a file; a larger one is memory-mapped
ATTEMPTS = 100  # to read a file that is being replaced


def write_file(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file atomically: an earlier file stays until the new one is complete. Raises DataError."""
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"a recording must be saved to a file in an existing folder, got {path}.")
    header = {**header, "versions": {"torch": torch.__version__}}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        HEADER: json.dumps(header),
        SUMS: json.dumps(compute_checksums(tensors)),
    }
    metadata[SUM] = compute_header_checksum(metadata, tensors)
    try:
        with write_atomically(path) as (beside,):
            save_file(tensors, beside, metadata)
    except (OSError, SafetensorError) as error:
        raise DataError(describe_failed_write("the recording", path, error)) from error


def read_file(path: Path, verify: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a recording's file. Raises DataError.

    Without `verify` the tensors are not read yet.
    """
    for _ in range(ATTEMPTS):
        if not path.is_file():
            raise DataError(f"{path} is not a file. Write a recording with recording.save(path).")
        before = read_identity(path)
        try:
            found = read_once(path, verify)
        except DataError:
            if read_identity(path) == before:
                raise
        else:
            if read_identity(path) == before:
                return found
    raise DataError(f"{path} keeps changing while it is read. Read it again when nothing writes to it.")


def read_identity(path: Path) -> tuple[int, ...]:
    """Return what distinguishes a file from one that replaces it; empty if there is none.

    safetensors opens the file twice, for its header and to map it.
    """
    with suppress(OSError):
        found = path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


def read_once(path: Path, verify: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a file, assuming that it is not replaced meanwhile. Raises DataError."""
    try:
        metadata, tensors = read_tensors(path) if path.stat().st_size <= MOST_READ_BYTES else map_tensors(path)
        if parse_version(path, metadata) >= 3:
            verify_checksums(path, metadata, tensors, verify)
        header = json.loads(metadata[HEADER])
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RuntimeError: an impossible shape
        raise build_damage_error(path, error) from None
    if not isinstance(header, dict):
        raise build_damage_error(path, ValueError("its header is not a JSON object"))
    return header, tensors


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file, which do not depend on it any more."""
    content = path.read_bytes()
    tensors = load(content)
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return head.get("__metadata__") or {}, tensors


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file, memory-mapped: a program that truncates the file ends this one."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def parse_version(path: Path, metadata: dict[str, str]) -> int:
    """Return the version of a recording's file. Raises DataError if it is none or too new."""
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file, but not a recording: it was not written by recording.save.")
    version = metadata.get("version", "")
    if not version.isdecimal() or int(version) > VERSION:
        raise DataError(
            f"{path} is a recording of version {version:.20}, and this regard reads up to {VERSION}: update regard."
        )
    return int(version)


def verify_checksums(path: Path, metadata: dict[str, str], tensors: dict[str, Tensor], verify: bool) -> None:
    """Raise DataError if the header, or with `verify` one of the tensors, differs from its checksum."""
    if metadata[SUM] != compute_header_checksum({name: said for name, said in metadata.items() if name != SUM}, tensors):
        raise DataError(
            f"{path} is damaged: its header has changed since it was written. Copy the file again, or record again."
        )
    altered = find_altered_tensor(tensors, json.loads(metadata[SUMS])) if verify else None
    if altered is not None:
        raise DataError(
            f"{path} is damaged: the numbers of its tensor {altered!r} have changed since it was written. Copy the file again, "
            "or record again; load(path, verify=False) reads it as it is."
        )


def build_damage_error(path: str | Path, error: Exception) -> DataError:
    """Return the error for a file that is not a valid recording."""
    return DataError(f"{path} is not a recording that regard wrote, or it is damaged: {str(error) or type(error).__name__}.")
