"""Storage for the tensors of a recording: in memory, or in a folder from which they are memory-mapped."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.computed_bias import ComputedBias, drop_repeated_axes
from regard.mechanism.arguments import check_path, describe_value

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VALUES, RESIDUAL = "values", "residual"
SMALL = 2**16  # bytes; a smaller tensor stays in memory


@dataclass(eq=False)
class Store:
    """How tensors are stored: the dtype, whether values and the residual stream are stored, and the folder."""

    dtype: torch.dtype | None = None
    values: bool = False
    residual: bool = False
    folder: Path | None = None
    count: int = 0

    @classmethod
    def from_arguments(cls, keep: str | Iterable[str] | None, to: str | Path | None) -> "Store":
        """Build the store that record's arguments describe. Raises ConfigError, also for a folder that is not empty."""
        if keep is not None and not isinstance(keep, Iterable):
            raise ConfigError(f"keep takes {', '.join(DTYPES)}, {VALUES} and {RESIDUAL}; got {describe_value(keep)}.")
        asked = [] if keep is None else re.split(r"[\s,+]+", keep) if isinstance(keep, str) else [str(one) for one in keep]
        unknown = [one for one in asked if one not in (*DTYPES, VALUES, RESIDUAL)]
        if unknown:
            raise ConfigError(f"keep takes {', '.join(DTYPES)}, {VALUES} and {RESIDUAL}; got {unknown[0]!r}.")
        folder = None if to is None else Path(check_path("to", to))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"to={str(folder)!r} is not empty: pass an empty folder, or a new one.")
        dtype = next((DTYPES[one] for one in asked if one in DTYPES), None)
        return cls(dtype, VALUES in asked, RESIDUAL in asked, folder)

    def copy_tensor(self, x: Tensor) -> Tensor:
        """Return a copy of x that nothing else writes to, memory-mapped from the folder if there is one and x is large."""
        if isinstance(x, ComputedBias):
            return x.apply(lambda one: self.copy_tensor(drop_repeated_axes(one)))
        copy = x.clone(memory_format=torch.contiguous_format)
        if self.folder is None or x.nbytes < SMALL or x.device.type != "cpu":
            return copy
        path = self.folder / f"{self.count:06d}.bin"
        self.count += 1
        try:
            with path.open("xb") as file:  # "x": a file that is mapped must not be overwritten
                file.write(copy.view(torch.uint8).numpy().data)
        except FileExistsError:
            raise ConfigError(f"{path} already exists: another recording writes to that folder. Pass another.") from None
        return torch.from_file(str(path), shared=False, size=x.numel(), dtype=x.dtype).view(x.shape)
