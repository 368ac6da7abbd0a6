"""Read the files of torch.save with torch's own reader of plain tensors: a pickle with anything else is refused."""

import pickle
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError
from regard.weights.storages import Opener, SavedObject, open_torch_file
from regard.weights.stored_tensor import StoredTensor, describe_error, make_memory_opener, read_into

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
MODEL = ("model", "model_state_dict", "state_dict")  # keys under which training scripts store the tensors
SETTINGS = ("model_args",)  # and the sizes of the model
PLAIN = (type(None), bool, int, float, str)  # types of a setting


def read_pickle(path: Path) -> tuple[dict[str, StoredTensor], Mapping[str, Any]]:
    """Return the tensors of a pickle, and the settings that nanoGPT stores with them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how the file was written; its content is checked here
            return list_tensors(path, open_torch_file(path))
    except RegardError:
        raise
    except pickle.UnpicklingError:
        raise WeightsError(
            f"{path} is a pickle of more than plain tensors, and could run any code: regard reads what "
            "torch.save(model.state_dict(), path) writes."
        ) from None
    except Exception as error:  # the reader of a damaged pickle may raise anything
        raise WeightsError(f"{path} is damaged, or not what torch.save writes: {describe_error(error)}.") from None


def list_tensors(path: Path, saved: SavedObject) -> tuple[dict[str, StoredTensor], Mapping[str, Any]]:
    """Return the tensors of a saved object, and the settings stored with them."""
    state, says = unwrap_state(saved.object)
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) and isinstance(n, str) for n, x in state.items()):
        raise WeightsError(f"{path} must map names to tensors, directly or under one of {', '.join(MODEL)}.")
    if not all(isinstance(name, str) and isinstance(value, PLAIN) for name, value in says.items()):
        raise WeightsError(f"{path}: {', '.join(SETTINGS)} must map names to numbers and strings.")
    ways: dict[object, Opener] = {}  # tensors that share their numbers in the file share the function
    return {name: describe_tensor(path, name, tensor, saved, ways) for name, tensor in state.items()}, says


def unwrap_state(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the state dict within a saved object, and the settings stored with it."""
    if not isinstance(found, Mapping):
        return found, {}
    says: Mapping[str, Any] = next((found[name] for name in SETTINGS if isinstance(found.get(name), Mapping)), {})
    return next((found[name] for name in MODEL if isinstance(found.get(name), Mapping)), found), says


def describe_tensor(path: Path, name: str, tensor: Tensor, saved: SavedObject, ways: dict[object, Opener]) -> StoredTensor:
    """Return a tensor of a pickle without reading it. Raises WeightsError unless it consists of plain numbers in the file."""
    is_plain = tensor.layout == torch.strided and tensor.is_meta and not tensor.is_quantized
    identity = tensor.untyped_storage()._cdata if is_plain else None
    if identity not in saved.storages or tensor.is_neg() or tensor.is_conj():
        raise WeightsError(f"{path}: {name} must be a plain tensor; save it again as tensor.clone().")
    place, shape, strides, size = saved.storages[identity], tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize
    start, span = int(tensor.storage_offset()), count_span(shape, strides)
    if (start + span) * size > place.size:
        raise WeightsError(f"{path}: {name} has the shape {shape}, which is more numbers than it has in the file.")
    if prod(shape) > span or (prod(shape) < span and not saved.has_checksums):
        # overlapping numbers or, if no checksum can distinguish that from damage, numbers with gaps
        raise WeightsError(f"{path}: {name} has the strides {strides}; save it again as tensor.contiguous().")
    way = make_opener(place.part(start * size, span * size), tensor)
    way = ways.setdefault((identity, start, shape, strides, tensor.dtype), way)
    return StoredTensor(path, name, shape, tensor.dtype, way, swapped=saved.swapped)


def count_span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return how many numbers there are from the first of a tensor to its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else 0


def make_opener(part: Opener, tensor: Tensor) -> Opener:
    """Return a function that opens the bytes of a tensor in row-major order, whatever its strides in the file."""
    return (
        part
        if tensor.is_contiguous()
        else make_memory_opener(lambda: read_strided_tensor(part, tuple(tensor.shape), tensor.stride(), tensor.dtype))
    )


def read_strided_tensor(part: Opener, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor that is stored in a part of the file with these strides."""
    content = bytearray(count_span(shape, strides) * dtype.itemsize)
    with part() as file:
        read_into(file, memoryview(content))
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, strides)
