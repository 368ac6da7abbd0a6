"""Models of .gguf files as transformers saves them, kept on disk by the content of the file, so that each is converted once."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from regard.atomic_write import write_folder_atomically

MANIFEST = "sha256.json"  # the checksums of the files of a model; a folder without it is not whole
MAX_CACHE_BYTES = 4 * 2**30  # of all models; those used longest ago are removed first


def find_cache_folder() -> Path:
    """Return the folder of converted models: REGARD_CACHE, or in XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("REGARD_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard") / "converted"


def find_converted(path: Path, *form: str) -> Path:
    """Return the place of a file's model in a form, such as the class that loads it and a version; nothing may be there."""
    return find_cache_folder() / "-".join((compute_checksum(path)[:32], *form))


def is_whole(place: Path) -> bool:
    """Return whether a converted model is at a place as it was written; one that is not is removed."""
    try:
        checksums: dict[str, str] = json.loads((place / MANIFEST).read_bytes())
        if all(compute_checksum(place / name) == checksum for name, checksum in checksums.items()):
            os.utime(place)
            return True
    except (OSError, ValueError, AttributeError):
        pass
    shutil.rmtree(place, ignore_errors=True)
    return False


def save_converted(place: Path, size: int, save: Callable[[Path], Any]) -> None:
    """Save a model of `size` bytes at a place by a function of a folder, whole or not at all.

    One that is too large, or that the disk does not take, is not saved: it is converted the next time again.
    """
    if size > MAX_CACHE_BYTES:
        return
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with write_folder_atomically(place) as folder:
            save(folder)
            checksums = {one.name: compute_checksum(one) for one in sorted(folder.iterdir())}
            (folder / MANIFEST).write_text(json.dumps(checksums))
        remove_oldest(place.parent)


def remove_oldest(folder: Path, most: int = MAX_CACHE_BYTES) -> None:
    """Remove the models used longest ago until the others have at most `most` bytes; the newest stays."""
    places = sorted((one for one in folder.iterdir() if (one / MANIFEST).is_file()), key=lambda one: one.stat().st_mtime)
    while len(places) > 1 and sum(map(count_bytes, places)) > most:
        shutil.rmtree(places.pop(0), ignore_errors=True)


def count_bytes(place: Path) -> int:
    """Count the bytes of all files in a folder; 0 where there is none."""
    return sum(one.stat().st_size for one in place.rglob("*") if one.is_file())


def compute_checksum(path: Path) -> str:
    """Compute the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_cache() -> str:
    """Describe the converted models: their number, bytes and folder."""
    folder = find_cache_folder()
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    return f"{len(places)} converted model{'s' * (len(places) != 1)}, {sum(map(count_bytes, places)) / 1e9:.1f} GB, in {folder}"


def clear_cache() -> None:
    """Remove all converted models."""
    shutil.rmtree(find_cache_folder(), ignore_errors=True)


@contextmanager
def read_gguf_once() -> Iterator[None]:
    """Let transformers, which reads the metadata of a .gguf file three times and lists its names once a layer, do both once."""
    import gguf

    names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = cache(names[0]), cache(names[1])  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = names  # type: ignore[misc]
