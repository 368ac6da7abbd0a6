"""minGPT's gpt-nano that learned to sort six letters, and every tensor of a run of it, where ../shared/data holds them."""

import base64
import json
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "../shared/data/sorter"
MISSING = "needs the folder shared/data/sorter beside the repository, which this machine lacks"


def tensors(name: str) -> tuple[dict, dict[str, Tensor]]:
    """The settings of a file, and its tensors from base64."""
    held = json.loads((FOLDER / name).read_text())
    settings = held.pop("config")
    return settings, {
        key: torch.frombuffer(bytearray(base64.b64decode(one["data"])), dtype=torch.float32).view(one["shape"])
        for key, one in held.items()
    }


def write(folder: Path) -> Path:
    """The model as torch.save would have kept it, its settings beside it in transformers' spelling."""
    settings, state = tensors("gpt-nano-sort-model.json")
    del settings["model_type"]  # minGPT's name of a size
    torch.save(state, folder / "model.pt")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder
