"""An atlas of which a file was altered is refused in a sentence, or gives the very same tables and pages."""

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import regard
from head_atlas.small_atlas import SETTINGS, make_model, make_texts, read_results
from regard.errors import ConfigError, DataError
from regard.head_atlas.build_atlas import merge_atlas
from regard.head_atlas.plan import FILES, PLAN, compute_file_checksum, get_shard_path, read_plan
from regard.observe.files.checksums import compute_checksums, compute_header_checksum

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'regard[atlas]'")
pytestmark = pytest.mark.slow
TIMES = 40  # alterations of each file
NASTY = [None, True, -1, 0, 2, 0.5, 2**31, 2**62, 2**80, "", "x", "\udcff", [], {}, [[]], [["0", 2**62]], [["0", -1]], [["0"]]]
WORDS = [b"-5", b"true", b"1e999", b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"\\ud800", b"\x00", b""]


@pytest.fixture(scope="module")
def atlas_folder(tmp_path_factory) -> Path:
    """An atlas of nine documents in five shards."""
    folder = tmp_path_factory.mktemp("atlas") / "made"
    regard.atlas(make_model(), make_texts(), folder, **SETTINGS)
    return folder


@pytest.fixture
def folder(atlas_folder, tmp_path) -> Path:
    """A copy of the atlas without its tables and pages."""
    shutil.copytree(atlas_folder, tmp_path / "atlas")
    remove_results(tmp_path / "atlas")
    return tmp_path / "atlas"


def remove_results(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.unlink()
    shutil.rmtree(folder / "site", ignore_errors=True)


def alter_bytes(held: bytes, dice: random.Random) -> bytes:
    """Flip a bit, cut an end off, leave a part out, put another word at the place of a number, or keep nothing else."""
    start, stop = sorted(dice.randrange(len(held) + 1) for _ in range(2))
    word = dice.choice(WORDS)
    at = dice.choice([place for place, byte in enumerate(held) if byte in b"0123456789"] or [start])
    flipped = bytearray(held)
    flipped[min(start, len(held) - 1)] ^= 1 << dice.randrange(8)
    return dice.choice([bytes(flipped), held[:start], held[:start] + held[stop:], held[:at] + word + held[at + 1 :], word])


def refuse(error: DataError) -> None:
    """Assert that an error is short enough to read."""
    assert len(str(error)) <= 500


def merge_altered(folder: Path) -> dict[str, bytes] | None:
    """Return the tables and pages that are made of a folder, or None if it is refused."""
    remove_results(folder)
    try:
        merge_atlas(folder)
    except DataError as error:
        return refuse(error)
    return {name: data for name, data in read_results(folder).items() if name.startswith("site") or name.endswith("parquet")}


def test_a_file_that_was_altered_is_refused_or_changes_no_result(atlas_folder, folder):
    dice, expected = random.Random(0), merge_altered(folder)
    assert expected
    found = []
    for path in [folder / name for name in (PLAN, *FILES)] + [get_shard_path(folder, number) for number in (0, 3)]:
        held = path.read_bytes()
        for _ in range(TIMES):
            path.write_bytes(alter_bytes(held, dice))
            results = merge_altered(folder)
            assert results in (None, expected), path
            found.append(results)
        path.write_bytes(held)
    print(f"{len(found)} altered files, {sum(one is None for one in found)} refused")
    assert sum(one is None for one in found) > len(found) * 0.9


def iterate_places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yield the keys that lead to each place of parsed JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from iterate_places(part, (*path, key))


def alter_json(value: dict, dice: random.Random) -> None:
    """Replace or remove a part of parsed JSON, in place."""
    *path, last = dice.choice(list(iterate_places(value)))
    for key in path:
        value = value[key]
    if dice.randrange(4):
        value[last] = copy.deepcopy(dice.choice(NASTY))
    else:
        del value[last]


def rewrite_plan(folder: Path, dice: random.Random) -> None:
    plan = json.loads((folder / PLAN).read_text())
    alter_json(plan, dice)
    (folder / PLAN).write_text(json.dumps(plan))


def rewrite_documents(folder: Path, dice: random.Random) -> None:
    """Alter the texts of the tokens, and write the checksum of what came of it."""
    pieces = json.loads((folder / FILES[2]).read_text())
    alter_json(pieces, dice)
    (folder / FILES[2]).write_text(json.dumps(pieces))
    plan = json.loads((folder / PLAN).read_text())
    plan["content"] = compute_file_checksum(folder / name for name in FILES)
    (folder / PLAN).write_text(json.dumps(plan))
    for number in range(read_plan(folder).shards):
        rewrite_shard(folder, number, lambda body, state: body["plan"].update(content=plan["content"]))


def rewrite_header(folder: Path, dice: random.Random) -> None:
    rewrite_shard(folder, dice.randrange(2), lambda body, state: alter_json(body, dice))


def rewrite_numbers(folder: Path, dice: random.Random) -> None:
    def alter(body: dict, state: dict) -> None:
        name = dice.choice(sorted(state))
        if dice.randrange(3):
            state[name].view(-1)[dice.randrange(state[name].numel())] = dice.choice([-1, 7, 2**31, 2**53])
        else:
            state[name] = torch.zeros(dice.choice([(), (3,), (0, 4)]), dtype=dice.choice([torch.bool, torch.float64]))

        body["tensors"] = compute_checksums(state)

    rewrite_shard(folder, dice.randrange(2), alter)


def rewrite_shard(folder: Path, number: int, alter: Callable) -> None:
    """Alter the header or the numbers of a shard, and write it with the checksum of what came of it."""
    path = get_shard_path(folder, number)
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    body = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["atlas"])["body"]
    state = safetensors.torch.load(data)
    alter(body, state)
    checksum = compute_header_checksum({"body": json.dumps(body)}, state)
    path.write_bytes(safetensors.torch.save(state, {"atlas": json.dumps({"body": body, "checksum": checksum})}))


@pytest.mark.parametrize("rewrite", [rewrite_plan, rewrite_documents, rewrite_header, rewrite_numbers])
def test_what_was_made_up_is_refused_or_read_though_its_checksums_are_right(atlas_folder, folder, rewrite):
    dice, found = random.Random(0), []
    for _ in range(TIMES):
        shutil.rmtree(folder)
        shutil.copytree(atlas_folder, folder)
        rewrite(folder, dice)
        found.append(merge_altered(folder))
    print(f"{len(found)} altered folders, {sum(one is None for one in found)} refused")
    assert any(one is None for one in found)


def test_documents_that_were_altered_are_not_computed_with(atlas_folder, folder):
    get_shard_path(folder, 1).unlink()
    data = bytearray((folder / FILES[0]).read_bytes())
    data[-4] ^= 1
    (folder / FILES[0]).write_bytes(data)
    with pytest.raises((DataError, ConfigError), match=r"altered|other documents"):
        regard.atlas(make_model(), make_texts(), folder, **SETTINGS)
