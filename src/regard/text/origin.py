"""The origin of prepared data: a hash of the sources' contents, and the settings that it was prepared with.

A folder that was prepared from other contents is prepared again, even if the sources have the same names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.atomic_write import write_atomically
from regard.errors import DataError

NAME = "source.json"  # in the prepared folder


@dataclass(frozen=True)
class Origin:
    """The names of sources, the hash of their contents, and the settings; equal origins give equal data."""

    names: tuple[str, ...]
    digest: str
    settings: Mapping[str, Any]

    def is_origin_of(self, folder: Path) -> bool:
        """Return whether a folder was prepared from the same contents, wherever they are, with the same settings."""
        header = read_origin(folder)
        return header is not None and (header.digest, header.settings) == (self.digest, self.settings)

    def write(self, folder: Path) -> None:
        """Write the origin into a folder that was prepared from it."""
        with write_atomically(folder / NAME) as (path,):
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin | None:
    """Read the origin of a folder; None if there is none."""
    try:
        header = json.loads((folder / NAME).read_bytes())
        return Origin(tuple(header["names"]), header["digest"], header["settings"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def hash_files(paths: Sequence[Path], *, with_names: bool) -> str:
    """Return a hash of files in order: the content of each, and its name or only its suffix."""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").digest()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        name = path.name if with_names else path.suffix
        total.update(len(name.encode(errors="surrogateescape")).to_bytes(8, "little") + name.encode(errors="surrogateescape"))
        total.update(digest)
    return total.hexdigest()
