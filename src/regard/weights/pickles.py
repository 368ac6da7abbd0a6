"""What torch.save writes, read by torch's own reader of plain tensors: a pickle that asks for anything else is refused."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import WeightsError
from regard.weights.arrays import DAMAGED
from regard.weights.stored import Stored, held, part_of

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
MODEL = ("model", "model_state_dict", "state_dict")  # where training scripts put the tensors
SETTINGS = ("model_args",)  # and the sizes


def read(path: Path) -> tuple[dict[str, Stored], Mapping[str, Any]]:
    """The tensors of a pickle, and the settings that nanoGPT writes beside them."""
    whole = zipfile.is_zipfile(path)  # else torch's format before 1.6, which holds no places to read from
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how the file was written; what is in it is checked here
            # on "meta" nothing is read but names, shapes and places
            found = torch.load(path, weights_only=True, map_location="meta" if whole else "cpu")
    except pickle.UnpicklingError:
        raise WeightsError(
            f"{path} is a pickle of more than plain tensors, and could run any code: regard reads what "
            "torch.save(model.state_dict(), path) writes."
        ) from None
    except DAMAGED as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path} is damaged, or not what torch.save writes: {reason}") from None
    state, says = unwrapped(found)
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise WeightsError(f"{path} must hold tensors by their names, or those under one of {', '.join(MODEL)}.")
    return {str(name): stored(path, str(name), tensor) for name, tensor in state.items()}, says


def unwrapped(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """The tensors, and the settings beside them."""
    if not isinstance(found, Mapping):
        return found, {}
    says: Mapping[str, Any] = next((found[name] for name in SETTINGS if isinstance(found.get(name), Mapping)), {})
    return next((found[name] for name in MODEL if isinstance(found.get(name), Mapping)), found), says


def stored(path: Path, name: str, tensor: Tensor) -> Stored:
    """A tensor of a pickle, read where it lies."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if not tensor.is_meta:
        return Stored(path, name, shape, dtype, held(lambda: tensor.detach()))
    place: Any = tensor.untyped_storage()  # where torch notes the place of a tensor it does not read
    start = place._checkpoint_offset + int(tensor.storage_offset()) * dtype.itemsize
    if tensor.is_contiguous():
        return Stored(path, name, shape, dtype, part_of(path, start))

    def laid_out() -> BufferedIOBase:
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        with path.open("rb") as file:
            file.seek(start)
            numbers = torch.frombuffer(bytearray(file.read(span * dtype.itemsize)), dtype=dtype)
        return held(lambda: numbers.as_strided(shape, tensor.stride()))()

    return Stored(path, name, shape, dtype, laid_out)
