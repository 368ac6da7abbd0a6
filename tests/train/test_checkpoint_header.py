import copy
import json

import pytest

from regard import DataError
from regard.train import checkpoint_header
from regard.train.checkpoint_header import read_header, write_header

SAYS = {"step": 41, "held_out_nats": 2.5, "best": 2.5, "running": {"mean": 2.75, "count": 41}}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-00000041"
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(name.encode() * 7)
    write_header(path, SAYS)
    return path


def read(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


def write(folder, says) -> None:
    (folder / "run.json").write_text(json.dumps(says))


def places(says, path=()):
    """The path to every value in nested dictionaries and lists."""
    for key in says if isinstance(says, dict) else range(len(says)):
        yield (*path, key)
        if isinstance(says[key], dict | list):
            yield from places(says[key], (*path, key))


def alter(says, path, change):
    altered = copy.deepcopy(says)
    inside = altered
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = change(inside[path[-1]])
    return altered


def test_what_was_written_is_read(folder):
    says = read_header(folder)
    assert SAYS.items() <= says.items()
    assert says["files"].keys() == {".metadata", "__0_0.distcp"}


CHANGES = {
    "one more": lambda value: value + 1 if isinstance(value, int | float) else str(value) + "1",
    "true": lambda value: True,
    "null": lambda value: None,
    "a word": lambda value: "word",
    "negative": lambda value: -5,
    "a list": lambda value: [value],
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_value_that_was_altered_is_refused(folder, change):
    says = read(folder)
    for path in places(says):
        write(folder, altered := alter(says, path, CHANGES[change]))
        if altered != says:
            with pytest.raises(DataError):
                read_header(folder)


def test_any_name_that_was_altered_or_left_out_is_refused(folder):
    says = read(folder)
    for name in says:
        rest = {key: value for key, value in says.items() if key != name}
        for altered in (rest, {**rest, f"{name}s": says[name]}):
            write(folder, altered)
            with pytest.raises(DataError):
                read_header(folder)


@pytest.mark.slow
def test_any_bit_that_was_flipped_is_refused_or_changes_nothing(folder):
    path = folder / "run.json"
    held, says = path.read_bytes(), read_header(folder)
    refused = 0
    for place in range(8 * len(held)):
        altered = bytearray(held)
        altered[place // 8] ^= 1 << place % 8
        path.write_bytes(altered)
        try:
            assert read_header(folder) == says  # white space
        except DataError:
            refused += 1
    assert refused > 7 * len(held)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("step", -5, "step must be a whole number of at least 0; got -5"),
        ("step", True, "step must be a whole number of at least 0; got True"),
        ("step", 41.0, "step must be a whole number"),
        ("step", "41", "step must be a whole number"),
        ("step", 42, "step is 42, but the folder is step-00000041"),
        ("step", 10**400, "step is 1000"),
        ("version", True, "version must be a whole number; got True"),
        ("version", 3, "has version 3, and this regard reads up to 2: update regard"),
        ("held_out_nats", "2.5", "held_out_nats must be a number; got '2.5'"),
        ("files", {}, r"files must name \.metadata"),
        ("files", [".metadata"], r"files must name \.metadata"),
        ("files", {".metadata": [1, 1], "../step-00000007/x": [1, 1]}, "files of this folder; got '../step-00000007/x'"),
        ("files", {".metadata": [1, 1], "/etc/passwd": [1, 1]}, "files of this folder; got '/etc/passwd'"),
        ("files", {".metadata": [1, 1], "..": [1, 1]}, r"files of this folder; got '\.\.'"),
        ("files", {".metadata": [-1, True]}, r"the length and the checksum of \.metadata; got \[-1, True\]"),
        ("files", {".metadata": "word"}, r"the length and the checksum of \.metadata; got 'word'"),
        ("files", {".metadata": [1, 1]}, r"it does not name __0_0\.distcp, which is in the same folder"),
    ],
)
def test_what_was_made_up_is_refused_though_its_checksum_is_right(folder, name, value, says):
    write(folder, checkpoint_header.add_checksum({**read(folder), name: value}))
    with pytest.raises(DataError, match=says) as raised:
        read_header(folder)
    assert len(str(raised.value)) <= 500
