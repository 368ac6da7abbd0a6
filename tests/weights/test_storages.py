"""Files of torch.save as others leave them: zipped anew, compressed, short, of another byte order, without checksums."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.errors import WeightsError
from regard.weights import pickles

CHANGES = Callable[[str, bytes], bytes | None]


def numbers() -> dict[str, Tensor]:
    """Tensors that are one, share a storage, are turned, empty, a single number, and of several dtypes."""
    torch.manual_seed(0)
    flat, turned = torch.randn(53), torch.randn(7, 11)
    found = {"a": flat[:21].view(3, 7), "b": flat[21:], "turned": turned.T, "again": turned.T, "sliced": turned[:, 2:5]}
    found |= {"half": torch.randn(13).half(), "double": torch.randn(5).double(), "brain": torch.randn(5, 3).bfloat16()}
    return found | {"empty": torch.empty(0, 3), "one": torch.tensor(2.5), "whole": torch.arange(5)}


def save(path: Path, **how: bool) -> Path:
    torch.save(numbers(), path, **how)
    return path


def zip_anew(path: Path, compression: int = zipfile.ZIP_STORED, change: CHANGES = lambda name, content: content) -> Path:
    """The same records in the order of their names, as `unzip` and `zip -r` leave them."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in sorted(archive.namelist())}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            if (written := change(name.partition("/")[2], content)) is not None:
                archive.writestr(name, written)
    return path


def load(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file as regard reads it."""
    found = {}
    for name, tensor in pickles.read_pickle(path)[0].items():
        rows = [torch.empty(0, 1, dtype=tensor.dtype), *(row.clone() for row in tensor.read_rows(1))]
        found[name] = torch.cat(rows).view(tensor.shape)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [*found] == [*expected]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_was_unzipped_and_zipped_again_gives_the_same_tensors(tmp_path, compression):
    path = zip_anew(save(tmp_path / "m.bin"), compression)
    assert_same(load(path), numbers())
    if compression == zipfile.ZIP_STORED:
        assert_same(load(path), torch.load(path))


def test_the_other_byte_order_is_read(tmp_path):
    widths = {"half": 2, "double": 8, "brain": 2}
    kept = {name: x.contiguous() for name, x in numbers().items() if name in (*widths, "a", "one")}
    torch.save(kept, tmp_path / "m.bin")
    order = [*kept]

    def swap(name: str, content: bytes) -> bytes:
        if not name.startswith("data/"):
            return b"big" if name == "byteorder" else content
        width = widths.get(order[int(name.removeprefix("data/"))], 4)
        return np.frombuffer(content, f"<u{width}").byteswap().tobytes()

    path = zip_anew(tmp_path / "m.bin", change=swap)
    assert_same(load(path), kept)
    assert_same(load(path), torch.load(path))


def replace_record(name: str, content: bytes | None) -> CHANGES:
    return lambda record, former: content if record == name else former


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace_record("data/0", None), "it has no record data/0"),
        (replace_record("data/0", bytes(4)), "the storage 0 has 212 bytes, but its record has 4"),
        (replace_record("data/0", bytes(216)), "the storage 0 has 212 bytes, but its record has 216"),
        (replace_record("data.pkl", None), "must hold one data.pkl"),
        (replace_record("byteorder", b"middle"), "gives the byte order b'middle'"),
    ],
)
def test_records_that_are_missing_short_or_unknown_are_refused(tmp_path, change, sentence):
    with pytest.raises(WeightsError, match=sentence):
        load(zip_anew(save(tmp_path / "m.bin"), change=change))


@pytest.mark.parametrize(("name", "beside"), [("a", "b"), ("b", "a"), ("sliced", "turned"), ("turned", "turned")])
def test_a_changed_bit_is_noticed_in_any_part_of_a_storage_that_a_tensor_lies_in(tmp_path, name, beside):
    path = save(tmp_path / "m.bin")
    content, hit = path.read_bytes(), numbers()[beside]
    at = content.index((hit if hit.is_contiguous() else hit.T).numpy().tobytes()) + 2
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    tensors = pickles.read_pickle(path)[0]
    for _ in range(2):
        with pytest.raises(WeightsError, match="Bad CRC-32"):
            list(tensors[name].read_rows(1))
    list(tensors["double"].read_rows(1))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.randn(3, 1).expand(3, 5), r"w has the strides \(1, 0\); save it again as tensor.contiguous"),
        (torch.randn(3).to_sparse(), "w must be a plain tensor"),
        (torch._neg_view(torch.randn(3)), "w must be a plain tensor"),
    ],
)
def test_tensors_that_are_not_plain_numbers_are_refused(tmp_path, tensor, sentence, legacy):
    torch.save({"w": tensor}, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=sentence):
        pickles.read_pickle(tmp_path / "m.bin")
