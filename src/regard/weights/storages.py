"""Open the two file formats of torch.save without reading tensors: return the object, and the location of its tensors' bytes.

Since torch 1.6 a file is a zip archive: `data.pkl` is the object, `data/KEY` the bytes of a storage, and each record has a CRC,
which is verified for everything that is read. Before, a file was five pickles and the storages, one after the other, without a
checksum. torch's own unpickler of plain tensors reads the pickles; torch.load would guess the location of records.
"""

import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch._weights_only_unpickler import Unpickler
from torch.serialization import MAGIC_NUMBER, PROTOCOL_VERSION
from torch.storage import TypedStorage, UntypedStorage

from regard.errors import WeightsError
from regard.weights.stored_tensor import make_file_opener

LARGEST = 1 << 28  # bytes of a pickle; that of the largest GPT-2 has about 60,000
CHUNK = 1 << 20
Opener = Callable[[], BufferedIOBase]


class StorageBytes(NamedTuple):
    """The bytes of a storage: their number, and a function that returns the opener of a part, given its start and length."""

    size: int
    part: Callable[[int, int], Opener]


class SavedObject(NamedTuple):
    """The object in a file, its tensors without numbers, and the bytes of each storage, by its identity."""

    object: Any
    storages: dict[int, StorageBytes]
    has_checksums: bool
    swapped: bool = False


class MetaStorages:
    """The storages that a pickle names, on torch's "meta" device."""

    def __init__(self) -> None:
        self.by_key: dict[str, TypedStorage] = {}
        self.sizes: dict[str, int] = {}  # in bytes; torch enlarges a "meta" storage that is too small for a tensor

    def find_storage(self, saved_id: Any) -> TypedStorage:
        """Return the storage of a persistent id: ("storage", type, key, device, numbers), and before 1.6 a view, here None."""
        _, kind, key, _, count, *view = saved_id
        dtype = torch.uint8 if kind is UntypedStorage else kind.dtype
        if not isinstance(key, str) or not isinstance(count, int) or count < 0 or any(part is not None for part in view):
            raise ValueError("it names a storage in a way that torch.save does not write")
        size = count * dtype.itemsize
        if key not in self.by_key:
            memory = UntypedStorage(size, device="meta")
            self.by_key[key], self.sizes[key] = TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True), size
        if self.sizes[key] != size:
            raise ValueError(f"it gives the storage {key} two sizes")
        return self.by_key[key]

    def locate_bytes(self, find_bytes: Callable[[str], StorageBytes]) -> dict[int, StorageBytes]:
        """Return the bytes of each storage, by its identity; raise ValueError if their number is not that of the storage."""
        places = {}
        for key, storage in self.by_key.items():
            place = find_bytes(key)
            if place.size != self.sizes[key]:
                raise ValueError(f"the storage {key} has {self.sizes[key]:,} bytes, but its record has {place.size:,}")
            places[storage._untyped_storage._cdata] = place
        return places


def open_torch_file(path: Path) -> SavedObject:
    """Open a file written by torch.save. Raises WeightsError, or whatever a parser raises on a damaged file."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04" and not zipfile.is_zipfile(file):
            file.seek(0)
            return open_legacy(path, file)
    return open_zip(path)


def unpickle(file: BinaryIO | BytesIO, storages: MetaStorages) -> Any:
    """Return the next object in a file, of plain tensors only; raise pickle.UnpicklingError for anything else."""
    unpickler = Unpickler(file, encoding="utf-8")
    unpickler.persistent_load = storages.find_storage  # type: ignore[method-assign]
    return unpickler.load()


def open_zip(path: Path) -> SavedObject:
    """Open a zip archive by its own directory, whoever created it, compressed or not."""
    archive = zipfile.ZipFile(path)  # stays open to read the tensors
    records = list_records(archive)
    roots = [name.removesuffix("data.pkl") for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(roots) != 1 or f"{roots[0]}constants.pkl" in records:
        raise WeightsError(f"{path} is an archive not written by torch.save: it must hold one data.pkl and no constants.pkl.")
    has_checksums = any(info.CRC for info in records.values())
    if not has_checksums:  # written with torch.serialization.set_crc32_options(False)
        for info in records.values():
            del info.CRC  # zipfile then verifies nothing
    storages, intact = MetaStorages(), set[str]()
    found = unpickle(BytesIO(read_record(archive, records[f"{roots[0]}data.pkl"])), storages)
    order = records.get(f"{roots[0]}byteorder")
    byteorder = b"little" if order is None else read_record(archive, order)
    if byteorder not in (b"little", b"big"):
        raise ValueError(f"it gives the byte order {byteorder[:20]!r}")

    def find_bytes(key: str) -> StorageBytes:
        info = records.get(f"{roots[0]}data/{key}")
        if info is None:
            raise ValueError(f"it has no record data/{key}")
        return StorageBytes(info.file_size, lambda start, length: partial(open_record, archive, info, start, length, intact))

    return SavedObject(found, storages.locate_bytes(find_bytes), has_checksums, byteorder == b"big")


def list_records(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the records of an archive by name; raise if a name is repeated or differs from that in the directory."""
    records: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename in records:
            raise ValueError(f"it holds {info.filename} twice")
        archive.open(info).close()  # verifies the name
        records[info.filename] = info
    return records


def read_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a short record after verifying its CRC."""
    if info.file_size > LARGEST:
        raise ValueError(f"its {info.filename} has {info.file_size:,} bytes")
    with archive.open(info) as file:
        return file.read()


def open_record(archive: zipfile.ZipFile, info: zipfile.ZipInfo, start: int, length: int, intact: set[str]) -> BufferedIOBase:
    """Open a record at a byte. Its CRC is verified when its last byte is read, or here if only a part will be."""
    if length < info.file_size and info.filename not in intact:
        with archive.open(info) as file:
            skip_bytes(file, info.file_size)
        intact.add(info.filename)
    file = archive.open(info)
    skip_bytes(file, start)
    return cast(BufferedIOBase, file)


def skip_bytes(file: Any, count: int) -> None:
    """Skip a part of a file by reading it; raise EOFError if the file ends before."""
    while count:
        read = len(file.read(min(count, CHUNK)))
        if not read:
            raise EOFError("the file ends before its last number")
        count -= read


def open_legacy(path: Path, file: BinaryIO) -> SavedObject:
    """Open a file that torch wrote before 1.6."""
    storages = MetaStorages()
    magic, protocol, _ = (unpickle(file, storages) for _ in range(3))
    if magic != MAGIC_NUMBER or protocol != PROTOCOL_VERSION:
        raise pickle.UnpicklingError("it does not begin like a file of torch.save")
    found, keys = unpickle(file, storages), unpickle(file, storages)
    if not isinstance(keys, list) or sorted(keys) != sorted(storages.by_key):
        raise ValueError("its list of storages does not match its tensors")
    places: dict[str, StorageBytes] = {}
    end = path.stat().st_size
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        start, size = file.tell(), count * storages.by_key[key].dtype.itemsize
        places[key] = StorageBytes(size, partial(make_part_opener, path, start))
        if start + size > end:
            raise EOFError("the file ends before its last number")
        file.seek(size, 1)
    if file.tell() != end:
        raise ValueError(f"{end - file.tell():,} bytes follow its last number")
    return SavedObject(found, storages.locate_bytes(places.__getitem__), has_checksums=False)


def make_part_opener(path: Path, first: int, start: int, length: int) -> Opener:
    """Return the opener of a part of a storage."""
    del length  # no checksum to verify
    return make_file_opener(path, first + start)
