"""Read the files of torch.save by torch's own loader of plain tensors: a pickle with anything else is refused."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError
from regard.weights.stored_tensor import StoredTensor, describe_error

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
MODEL = ("model", "model_state_dict", "state_dict")  # keys under which training scripts store the tensors
SETTINGS = ("model_args",)  # and the sizes of the model
PLAIN = (type(None), bool, int, float, str)  # types of a setting


def read_pickle(path: Path) -> tuple[dict[str, StoredTensor], Mapping[str, Any]]:
    """Return the tensors of a pickle, all of which are in memory, and the settings that nanoGPT stores with them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how the file was written; its content is checked here
            return list_tensors(path, load_object(path))
    except RegardError:
        raise
    except pickle.UnpicklingError:
        raise WeightsError(
            f"{path} is a pickle of more than plain tensors, and could run any code: regard reads what "
            "torch.save(model.state_dict(), path) writes."
        ) from None
    except Exception as error:  # the reader of a damaged pickle may raise anything
        raise WeightsError(f"{path} is damaged, or not what torch.save writes: {describe_error(error)}.") from None


def load_object(path: Path) -> Any:
    """Return the object in a file. Raises ValueError for a wrong checksum or bytes behind the last number."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:  # torch verifies no checksums, and may have been told to write none
            has_checksums = any(info.CRC for info in archive.infolist())
            altered = archive.testzip() if has_checksums else None
        if altered is not None:
            raise ValueError(f"the checksum of its {altered} does not match")
    with path.open("rb") as file:
        found = torch.load(file, map_location="cpu", weights_only=True)
        if not zipfile.is_zipfile(path) and file.read(1):
            raise ValueError("bytes follow its last number")
    return found


def list_tensors(path: Path, found: Any) -> tuple[dict[str, StoredTensor], Mapping[str, Any]]:
    """Return the tensors of a saved object, and the settings stored with them."""
    state, says = unwrap_state(found)
    if not isinstance(state, Mapping) or not all(isinstance(x, Tensor) and isinstance(n, str) for n, x in state.items()):
        raise WeightsError(f"{path} must map names to tensors, directly or under one of {', '.join(MODEL)}.")
    if not all(isinstance(name, str) and isinstance(value, PLAIN) for name, value in says.items()):
        raise WeightsError(f"{path}: {', '.join(SETTINGS)} must map names to numbers and strings.")
    for name, x in state.items():
        if x.layout != torch.strided or x.is_quantized:
            raise WeightsError(f"{path}: {name} must be a dense tensor of plain numbers, got {x.layout} of {x.dtype}.")
    return {name: StoredTensor(path, name, tuple(x.shape), x.dtype, x.resolve_neg) for name, x in state.items()}, says


def unwrap_state(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the state dict within a saved object, and the settings stored with it."""
    if not isinstance(found, Mapping):
        return found, {}
    says: Mapping[str, Any] = next((found[name] for name in SETTINGS if isinstance(found.get(name), Mapping)), {})
    return next((found[name] for name in MODEL if isinstance(found.get(name), Mapping)), found), says
