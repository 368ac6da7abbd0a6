"""A folder of prepared data: written at once or not at all, with an index, the files of the encoding, and its origin.

The origin is a hash of the sources' contents and the settings that they were prepared with. A folder that was prepared from
other contents is prepared again, even if the sources have the same names.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from zlib_ng.zlib_ng import crc32

from regard.atomic_write import write_atomically, write_folder_atomically
from regard.errors import DataError
from regard.text.byte_pair import BytePair
from regard.text.byte_pair_files import FILES
from regard.text.letters import FILE_NAME as LETTERS
from regard.text.letters import Letters

Tokenizer = BytePair | Letters
ORIGIN = "source.json"  # in the prepared folder


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


@dataclass(frozen=True)
class FolderIndex(ABC):
    """The description of a folder of prepared data, in a JSON file with a checksum of itself.

    A subclass has the fields, and the class variables: the name of the file, its format and version, what it describes, and how
    the error of a folder without it continues.
    """

    NAME: ClassVar[str]
    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    DATA: ClassVar[str]
    MISSING: ClassVar[str]

    @property
    @abstractmethod
    def names(self) -> set[str]:
        """All files that the folder may have."""

    @classmethod
    @abstractmethod
    def parse(cls, header: dict[str, Any]) -> Self:
        """Parse an index; raise KeyError, TypeError, ValueError or AttributeError if it is invalid."""

    @property
    def checksum(self) -> int:
        """A number computed from the whole index: two folders with the same checksum hold the same data."""
        return crc32(json.dumps(asdict(self), sort_keys=True).encode())

    def write(self, folder: Path) -> None:
        """Write the index into a folder."""
        header = {"format": self.FORMAT, "version": self.VERSION, "checksum": self.checksum, **asdict(self)}
        (folder / self.NAME).write_text(json.dumps(header, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the index of a folder; raise DataError unless it is of a supported version and has the checksum it states."""
        path = folder / cls.NAME
        if not path.is_file():
            raise DataError(f"{folder} {cls.MISSING}")
        try:
            header = json.loads(path.read_bytes())
            if not isinstance(header, dict) or header.get("format") != cls.FORMAT:
                raise DataError(f"{path} is not an index of {cls.DATA} that regard prepared.")
            version = header["version"]
            if not isinstance(version, int) or version > cls.VERSION:
                raise DataError(f"{path} has version {version}, and this regard reads up to {cls.VERSION}: update regard.")
            index = cls.parse(header)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise make_damage_error(path, f"{type(error).__name__}: {error}") from None
        if index.checksum != header.get("checksum"):
            raise make_damage_error(path, "its content is not what was written")
        return index

    @classmethod
    def list_files(cls, folder: Path) -> set[str]:
        """Return the files of the data in a folder; none if it has none."""
        return cls.read(folder).names if (folder / cls.NAME).exists() else set()


def check_tokenizer_files(text: Any) -> dict[str, int]:
    """Return the files of an encoding and their checksums; raise ValueError for other files."""
    if not isinstance(text, dict) or not text.keys() <= {LETTERS, *FILES[0]} or not text:
        raise ValueError(f"text must name the files of an encoding; got {text!r}")
    return text


def make_damage_error(path: Path, why: str) -> DataError:
    """Return the error for an index that is not as it was written."""
    return DataError(f"{path} is damaged or altered: {why}. Prepare the corpus again.")


def compute_tokenizer_checksums(folder: Path) -> dict[str, int]:
    """Return the files of an encoding in a folder, with the checksum of each."""
    found = [folder / name for name in (LETTERS, *FILES[0]) if (folder / name).is_file()]
    return {path.name: crc32(path.read_bytes()) for path in found}


def load_tokenizer(folder: Path, files: dict[str, int]) -> Tokenizer:
    """Load the encoding in a corpus folder; raise DataError if its files are not those the corpus was prepared with."""
    for name, checksum in files.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing, but is part of this corpus: prepare it again.")
        if crc32(path.read_bytes()) != checksum:
            raise make_damage_error(path, "it is not the file that was written")
    return Letters.load(folder) if LETTERS in files else BytePair.load(folder)


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
        with write_atomically(folder / ORIGIN) as (path,):
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> Origin | None:
    """Read the origin of a folder; None if there is none."""
    try:
        header = json.loads((folder / ORIGIN).read_bytes())
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
