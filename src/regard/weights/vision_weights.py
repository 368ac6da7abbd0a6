"""Read and write regard's own vision transformers: a folder of settings.json and model.safetensors, in float16."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.errors import WeightsError
from regard.weights.json_object import read_object

SETTINGS, TENSORS = "settings.json", "model.safetensors"
INCLUDED = {"digits": Path(__file__).parent / "digits"}  # in this package


def write_vision_weights(folder: Path, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the sizes, and the tensors as float16, into an existing folder."""
    (folder / SETTINGS).write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def read_vision_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the sizes and the tensors, in float32, of a folder. Raises WeightsError if it holds none."""
    sizes = read_object(folder / SETTINGS)
    try:
        return sizes, {name: tensor.float() for name, tensor in load_file(folder / TENSORS).items()}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder / TENSORS} cannot be read: {error}.") from None
