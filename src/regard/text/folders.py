"""A folder of what was prepared: written beside, brought to the disk, then renamed onto its place, whole or not there."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import DataError


@contextmanager
def renewed(folder: Path, former: Callable[[Path], set[str]]) -> Iterator[Path]:
    """A folder beside this one, for the block to write: it takes its place where the block raises nothing.

    former says the files of what was prepared there before, none where nothing was: only these are replaced. Raises DataError
    for a folder that holds anything else, and where one cannot be written; what was there stays.
    """
    replaceable(folder, former)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        yield beside
        settle(beside)
        put(beside, folder)
    except OSError as error:
        raise DataError(f"the corpus could not be written to {folder}: {error}. What was there is as it was.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def replaceable(folder: Path, former: Callable[[Path], set[str]]) -> None:
    """DataError where a folder holds anything but what was prepared."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        ours = former(folder) if names else set()
        if not names or names - ours:
            other = next(iter(sorted(names - ours)), folder.name)
            raise DataError(f"{folder} holds what is no part of a corpus, {other}: nothing was changed. Name another folder.")


def settle(folder: Path) -> None:
    """Sees that every file of a folder is on disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def put(beside: Path, folder: Path) -> None:
    """Renames the new folder to its name; a former one goes when the new one stands there."""
    former = beside.with_suffix(".former")
    if folder.exists():
        os.replace(folder, former)
    try:
        os.replace(beside, folder)
    except OSError:
        if former.exists():
            os.replace(former, folder)
        raise
    shutil.rmtree(former, ignore_errors=True)
