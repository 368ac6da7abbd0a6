"""The files that a command writes: checked before it computes anything, and figures written atomically."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from regard.atomic_write import describe_failed_write, write_atomically
from regard.errors import ConfigError, DataError
from regard.mechanism.arguments import check_path

if TYPE_CHECKING:
    from regard.show.figure import Picture

DOTS_PER_INCH = 144
CHOOSE = "Choose another file."


def check_figure(path: str | None) -> None:
    """Raise ConfigError if --figure names a file that matplotlib cannot write, or matplotlib is not installed."""
    if path is None:
        return
    try:
        from regard.show.figure import Picture
    except ImportError:
        raise ConfigError("--figure needs matplotlib: pip install matplotlib.") from None
    if Path(path).suffix[1:].lower() not in Picture().canvas.get_supported_filetypes():
        raise ConfigError(f"--figure must be a file that ends in .png, .svg or .pdf, got {path}.")
    check_output_file("--figure", path)


def check_output_file(flag: str, path: str | None) -> None:
    """Raise ConfigError if a flag names a folder, a device, or a file in a folder that does not exist or cannot be written."""
    if path is None:
        return
    place = Path(check_path(flag, path))
    if not place.parent.is_dir() or place.is_dir():
        raise ConfigError(f"{flag} must be a file in an existing folder, got {path}.")
    if place.exists() and not place.is_file():
        raise ConfigError(f"{flag} must be a new file or one to replace, got {path}, which is a device or a pipe. {CHOOSE}")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} must be a file in a folder that can be written, got {path}. {CHOOSE}")


def save_figure(figure: "Picture", path: str) -> None:
    """Save a figure atomically. Raises DataError if its file cannot be written, ConfigError if it cannot be drawn."""
    try:
        with write_atomically(Path(path)) as (partial,):
            figure.savefig(partial, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise DataError(describe_failed_write("the figure", path, error)) from None
    except ValueError as error:
        raise ConfigError(f"the figure could not be saved to {path}: {error}") from None
