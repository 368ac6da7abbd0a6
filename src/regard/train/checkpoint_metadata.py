"""Check the .metadata of a checkpoint: it is a pickle, which could run any code, so only known classes are unpickled."""

import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from regard.errors import DataError

CHECKPOINT_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
CHECKPOINT_CLASSES = {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"}
CHECKPOINT_CLASSES |= {"BytesStorageMetadata", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING"}
OTHER_NAMES = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath")}


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
