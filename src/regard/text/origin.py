"""What a prepared folder was made from: a hash of the sources' contents, and the settings that it was made by.

A folder that was made from anything else is not that of these sources, whatever their names are.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regard.errors import DataError
from regard.writing import whole

NAME = "source.json"  # in the folder


@dataclass(frozen=True)
class Origin:
    """The names of sources, the hash of what they hold, and the settings; two that are equal prepare the same."""

    names: tuple[str, ...]
    digest: str
    settings: Mapping[str, Any]

    def is_of(self, folder: Path) -> bool:
        """Return whether a folder was made from these contents, wherever they lie, by these settings."""
        said = read_origin(folder)
        return said is not None and (said.digest, said.settings) == (self.digest, self.settings)

    def write(self, folder: Path) -> None:
        """Write it into a folder that was prepared from it."""
        with whole(folder / NAME) as (path,):
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin | None:
    """Return what a folder was made from; None where it does not say."""
    try:
        said = json.loads((folder / NAME).read_bytes())
        return Origin(tuple(said["names"]), said["digest"], said["settings"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def hash_files(paths: Sequence[Path], *, with_names: bool) -> str:
    """Return a hash of files in their order: what each holds, and its name, or the ending alone."""
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
