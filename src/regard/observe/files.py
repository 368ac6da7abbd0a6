"""A header and named tensors on disk: safetensors with JSON, written beside and renamed, mapped when read, never a pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import DataError
from regard.writing import whole

FORMAT, VERSION = "regard recording", 2  # 2 has additive scores, and words of either axis
HEADER = "recording"  # the name of our own header among safetensors' metadata


def write(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes a file, which is whole or not there: a former one stays until the new one is written."""
    header = {**header, "versions": {"torch": torch.__version__}}
    metadata = {"format": FORMAT, "version": str(VERSION), HEADER: json.dumps(header)}
    if path.is_dir() or not path.parent.is_dir():
        raise DataError(f"a recording is saved to a file in a folder that exists, got {path}.")
    try:
        with whole(path) as (beside,):
            save_file(tensors, beside, metadata)
    except (OSError, SafetensorError) as error:
        raise DataError(f"the recording could not be written to {path}: {error}. Nothing was changed there.") from error


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file that `write` wrote, or DataError."""
    if not path.is_file():
        raise DataError(f"{path} is no file. A recording is written with recording.save(path).")
    try:
        with safe_open(path, framework="pt") as file:
            header = checked(path, file.metadata() or {})
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise damaged(path, error) from None


def checked(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Our own header, of a format and a version that can be read."""
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file, but no recording: it was not written by recording.save.")
    version = metadata.get("version", "")
    if not version.isdecimal() or int(version) > VERSION:
        raise DataError(
            f"{path} is a recording of version {version:.20}, and this regard reads up to {VERSION}: update regard."
        )
    header = json.loads(metadata[HEADER])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header


def damaged(path: str | Path, error: Exception) -> DataError:
    """The error for a file that is not what it should be."""
    return DataError(f"{path} is not a recording that regard wrote, or it is damaged: {str(error) or type(error).__name__}.")
