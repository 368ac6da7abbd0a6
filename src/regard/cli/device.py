"""The device that a command runs a model on."""

import torch

from regard.errors import ConfigError


def check_device(name: str | None) -> torch.device | None:
    """Return the device with a name, None for none. Raises ConfigError for one that this machine does not have."""
    try:
        return None if name is None else torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        known = ", ".join(["cpu", *(kind for kind, is_here in here.items() if is_here)])
        raise ConfigError(f"--device {name} cannot be used: {format_first_line(error)} The devices here: {known}.") from None


def format_first_line(error: Exception) -> str:
    """Return the first line of an error's message, with a full stop."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if line.endswith(".") else f"{line}."
