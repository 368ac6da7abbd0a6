"""Files that are whole or not there: written beside, brought to the disk, then renamed onto their places."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(*places: Path) -> Iterator[list[Path]]:
    """Paths beside these places, for the block to write: they take their places, in this order, where it raises nothing.

    What was at the places stays until then; where the block raises, or the process is killed, it stays for good. Raises
    FileExistsError, before anything is written, where a place is a folder, a device or a pipe.
    """
    for place in places:
        if place.exists() and not place.is_file():
            raise FileExistsError(errno.EEXIST, "it is there already, and is no file", str(place))
    beside = [place.with_name(f".{place.name}.{os.getpid()}.partial") for place in places]
    try:
        modes = [permissions(path) for path in beside]
        yield beside
        for path, mode in zip(beside, modes, strict=True):
            path.chmod(mode)
            with path.open("rb") as written:
                os.fsync(written.fileno())
        for path, place in zip(beside, places, strict=True):
            os.replace(path, place)
    finally:
        for path in beside:
            path.unlink(missing_ok=True)


def permissions(path: Path) -> int:
    """What a new file gets there; some writers, safetensors among them, would let nobody but its owner read it."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    path.unlink()
    return mode
