"""Write a folder of prepared data to a temporary place, flush it to disk, and rename it: it is complete or absent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.atomic_write import write_folder_atomically
from regard.errors import DataError


@contextmanager
def replace_folder(folder: Path, former: Callable[[Path], set[str]]) -> Iterator[Path]:
    """Yield a temporary folder for the block to write, which replaces `folder` if the block raises nothing.

    `former` returns the files of data that was prepared there before, none if there is none: only these are replaced. Raises
    DataError for a folder that holds anything else, or that cannot be written; the existing folder then stays.
    """
    try:
        check_replaceable(folder, former)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with write_folder_atomically(folder) as partial:
            yield partial
    except OSError as error:
        raise DataError(f"the corpus could not be written to {folder}: {error}. The folder is unchanged.") from error


def check_replaceable(folder: Path, former: Callable[[Path], set[str]]) -> None:
    """Raise DataError if a folder holds anything but prepared data."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        ours = former(folder) if names else set()
        if not names or names - ours:
            other = next(iter(sorted(names - ours)), folder.name)
            raise DataError(f"{folder} holds {other}, which is not part of a corpus: nothing was changed. Name another folder.")
