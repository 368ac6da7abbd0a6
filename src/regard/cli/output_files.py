"""The files that a command writes: checked before it computes anything, and figures written atomically."""

from pathlib import Path
from typing import TYPE_CHECKING

from regard.atomic_write import write_atomically
from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.show.figure import Picture

DOTS_PER_INCH = 144


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
    """Raise ConfigError if a flag names a folder, or a file in a folder that does not exist."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise ConfigError(f"{flag} must be a file in an existing folder, got {path}.")


def save_figure(figure: "Picture", path: str) -> None:
    """Save a figure atomically. Raises ConfigError if its file cannot be written."""
    try:
        with write_atomically(Path(path)) as (partial,):
            figure.savefig(partial, dpi=DOTS_PER_INCH)
    except (ValueError, OSError) as error:
        raise ConfigError(f"the figure could not be saved to {path}: {error}") from None
