"""Read files of numbers as named tensors: .npy, .npz, .csv and .safetensors. Nothing in a file is ever executed."""

import csv
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from regard.errors import DataError

Array = npt.NDArray[Any]
DELIMITERS = ",;\t"
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt")


def read_arrays(path: str | Path) -> dict[str, Tensor]:
    """Read the arrays in a file by name, in float32, every number finite.

    A .npy or .csv of numbers alone is one tensor, named after the file without its suffix. A .csv whose first column holds
    words is one tensor (d,) for each word; a first line of titles is skipped. Raises DataError, in one sentence, if the file is
    missing, damaged, of another kind, or contains anything but numbers.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(describe_unsupported_file(path))
    try:
        found = reader(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    if not found:
        raise DataError(f"{path} holds no numbers.")
    return {
        name: check_finite(numbers, f"{path}: {name!r}" if len(found) > 1 else str(path)) for name, numbers in found.items()
    }


def describe_unsupported_file(path: Path) -> str:
    """Return the error message for a file that no reader supports."""
    kinds = ", ".join(READERS)
    if path.suffix.lower() in PICKLES:
        return (
            f"{path} is a pickle, which may run any code when it is opened; regard reads {kinds}. "
            "Save it again with safetensors.torch.save_file(layer.state_dict(), 'weights.safetensors')."
        )
    return f"{path} ends in {path.suffix or 'nothing'}; regard reads {kinds}."


def read_numpy(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .npy or .npz file."""
    with path.open("rb") as data, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how the file was written; its content is checked here
        try:
            loaded = np.load(data, allow_pickle=False)
            arrays = {path.stem: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
            if isinstance(loaded, np.ndarray) and data.tell() < os.fstat(data.fileno()).st_size:
                raise ValueError("it does not end with its last number")
            for name, array in arrays.items():  # NumPy gives what is no array, in an archive, as bytes
                if not isinstance(array, np.ndarray):
                    raise ValueError(f"{name!r} is not an array")
        except Exception as error:  # the parser of a damaged file may raise anything
            if "allow_pickle" in str(error):
                error = ValueError("it holds Python objects or is not a NumPy file")
            raise DataError(describe_damage(path, "NumPy", error)) from None
    return {name: convert_to_tensor(array, f"{path}: {name!r}") for name, array in arrays.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file."""
    data = path.read_bytes()
    try:
        tensors: dict[str, Tensor] = load_safetensors(data)
    except Exception as error:  # the parser of a damaged file may raise anything
        raise DataError(describe_damage(path, "safetensors", error)) from None
    for name, tensor in tensors.items():
        if tensor.is_complex() or (tensor.dtype == torch.bool and name.rpartition(".")[2] != "mask"):
            raise DataError(f"{path}: {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, not real numbers.")
    return tensors


def read_csv(path: Path) -> dict[str, Tensor]:
    """Return the rows of a .csv file: one tensor (t, d), or one (d,) for each word of the first column."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            text = lines.read()
        first = text.lstrip().partition("\n")[0]
        delimiter = max(DELIMITERS, key=first.count)
        rows = list(iterate_rows(text, delimiter))
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text, so regard cannot read it as .csv.") from None
    except csv.Error as error:
        raise DataError(describe_damage(path, "csv", error)) from None
    if rows and not any(is_number(cell) for cell in rows[0][1][1:] or rows[0][1]):
        rows = rows[1:]  # titles
    if not rows:
        return {}
    named = sum(not is_number(row[0]) for _, row in rows)
    has_words = 2 * named > len(rows) and len(rows[0][1]) > 1  # most, not all: a sentence may contain the word '7'
    table = [parse_numbers(path, line, row[1:] if has_words else row, has_words) for line, row in rows]
    for (line, _), row in zip(rows, table, strict=True):
        if len(row) != len(table[0]):
            raise DataError(f"{path}, line {line}: {len(row)} numbers, but the first row has {len(table[0])}.")
    if not has_words:
        return {path.stem: torch.tensor(table, dtype=torch.float64)}
    words = [row[0].strip() for _, row in rows]
    if twice := next((word for word, count in Counter(words).items() if count > 1), None):
        raise DataError(f"{path} gives the word {twice!r} more than once.")
    return {word: torch.tensor(row, dtype=torch.float64) for word, row in zip(words, table, strict=True)}


def iterate_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table that are not empty, each with its line number in the file."""
    reader = csv.reader(text.splitlines(), delimiter=delimiter, strict=True)
    for row in reader:
        if any(cell.strip() for cell in row):
            yield reader.line_num, row


def parse_numbers(path: Path, line: int, cells: Sequence[str], has_words: bool) -> list[float]:
    """Return the cells of a row as numbers; raise DataError, naming the first cell that is not a number."""
    for column, cell in enumerate(cells, 2 if has_words else 1):
        if not is_number(cell):
            came = f"{cell.strip()[:40]!r} is not a number" if cell.strip() else "is empty"
            raise DataError(f"{path}, line {line}, column {column}: {came}.")
    return [float(cell) for cell in cells]


def is_number(cell: str) -> bool:
    """Return whether a cell can be parsed as a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def convert_to_tensor(array: Array, name: str) -> Tensor:
    """Return a NumPy array as a tensor; raise DataError if it does not hold real numbers."""
    if array.dtype.kind not in "fiub" or (array.dtype.kind == "b" and not name.endswith("mask'")):
        kind = {"U": "text", "S": "bytes", "c": "complex numbers", "b": "truth values"}.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {kind}, not real numbers.")
    with np.errstate(all="ignore"):  # of NaN and numbers that are too large; these are refused with their position
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64).reshape(array.shape))


def check_finite(numbers: Tensor, name: str) -> Tensor:
    """Return the numbers in float32; raise DataError, naming the first one that is NaN, infinite or too large."""
    if not numbers.numel():
        raise DataError(f"{name} has the shape {tuple(numbers.shape)}: it holds no numbers.")
    single = numbers.float()
    broken = (~single.isfinite()).nonzero()
    if len(broken):
        place = tuple(broken[0].tolist())
        position = f" at {place}, counted from 0" if place else ""
        raise DataError(f"{name} holds {numbers[place].item():g}{position}; every number must be finite in float32.")
    return single


def describe_damage(path: Path, kind: str, error: Exception) -> str:
    """Return the error message for a file that cannot be parsed, with the parser's reason."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"{path} is damaged, or not a {kind} file: {reason[:200]}."


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".npy": read_numpy,
    ".npz": read_numpy,
    ".csv": read_csv,
    ".safetensors": read_safetensors,
}
