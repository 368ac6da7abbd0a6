"""Recordings that were altered: every bit of one, every length, and headers that somebody wrote by hand."""

import contextlib
import copy
import json
import random
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from models.translators import make_translator, sentences
from regard import CausalAttention, DataError, RegardError
from regard.generate.translation_search import translate
from regard.observe import load, record
from regard.observe.files import safetensors_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recording_file(tmp_path_factory) -> Path:
    """A recording of one call."""
    path, model = tmp_path_factory.mktemp("small") / "small.reg", nn.Sequential(CausalAttention(5, 4, 11, 0.0))
    with record(model) as recording:
        model(torch.randn(2, 3, 5))
    recording.save(path)
    return path


@pytest.fixture(scope="module")
def search(tmp_path_factory) -> Path:
    """A recording of a search by beams, whose rows move at every step."""
    path, model = tmp_path_factory.mktemp("search") / "search.reg", make_translator("additive")
    with record(model, keep="values") as recording:
        translate(model, sentences(2, 3), beams=2, end=5, longest=4)
    recording.save(path)
    return path


def read(path: Path, content: bytes):
    """What a file of this content holds, or None where it is refused in a sentence."""
    path.write_bytes(content)
    try:
        load(path)
    except DataError as error:
        return refuse(error)
    return safetensors_file.read_file(path)


def refuse(error: DataError) -> None:
    """See that the sentence is one."""
    assert len(str(error)) <= 500


def is_same(one, other) -> bool:
    (header, tensors), (header_, tensors_) = one, other
    same_tensors = tensors.keys() == tensors_.keys() and all(
        x.dtype == tensors_[name].dtype and torch.equal(x, tensors_[name]) for name, x in tensors.items()
    )
    return header == header_ and same_tensors


@pytest.mark.parametrize("which", ["recording_file", "search"])
def test_a_file_with_a_bit_flipped_is_refused_or_holds_the_very_same_numbers(tmp_path, request, which):
    content, path = request.getfixturevalue(which).read_bytes(), tmp_path / "flipped.reg"
    written = read(path, content)
    bits = random.Random(11).sample(range(8 * len(content)), min(8 * len(content), 2_400))
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        found = read(path, flipped)
        assert found is None or is_same(found, written), f"bit {bit % 8} of byte {bit // 8}"


def test_a_file_of_any_shorter_length_and_one_with_bytes_behind_it_are_refused(tmp_path, recording_file):
    path, content = tmp_path / "cut.reg", recording_file.read_bytes()
    assert [length for length in range(len(content)) if read(path, content[:length]) is not None] == []
    assert read(path, content + b"\0") is None


@given(data=st.data())
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_several_scratches_is_refused_or_holds_the_very_same_numbers(tmp_path, search, data):
    path = tmp_path / "scratched.reg"
    written, scratched = safetensors_file.read_file(search), bytearray(search.read_bytes())
    for _ in range(data.draw(st.integers(1, 9))):
        scratched[data.draw(st.integers(0, len(scratched) - 1))] = data.draw(st.integers(0, 255))
    found = read(path, scratched)
    assert found is None or is_same(found, written)


NASTY = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 2, 3, 7, 2**31, 2**62, 2**63, 2**80, -(2**62), 0.5, 1e300, -1.0, "t0", "t3", "t999", ""]
    ),
    st.sampled_from(
        ["self", "cross", "\x1b]52;c;eA==\x07", "\udcff", [], {}, [[]], ["Causal"], ["Not", ["Causal"]], ["Given", "t0"]]
    ),
    st.sampled_from(
        [["Documents", "t0", None], ["Documents", "t0", "t3"], ["Window", -3, None], ["Window", 2**62, 1], ["Prefix", 2**70]]
    ),
    st.sampled_from(
        [["Padding", []], ["Padding", [2**62, 1]], ["And", ["Causal"], ["Padding", [1, 2]]], ["Or", 1], ["Padding", "12"]]
    ),
)


def places(value, path=()):
    """Every place in a header, as the keys that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


def change(header, data) -> None:
    """Replace, remove, repeat or move a part of a header."""
    *path, last = data.draw(st.sampled_from(list(places(header))))
    owner = header
    for key in path:
        owner = owner[key]
    how = data.draw(st.sampled_from(["replace", "remove", "repeat", "move"]))
    if how == "replace":
        owner[last] = copy.deepcopy(data.draw(NASTY))
    elif how == "remove":
        del owner[last]
    elif how == "repeat" and isinstance(owner, list):
        owner.extend(copy.deepcopy(owner[last]) for _ in range(data.draw(st.sampled_from([1, 2, 50]))))
    elif isinstance(owner, list):
        owner.reverse()


def change_tensor(path: Path, data) -> None:
    """Give a tensor of a file another shape or dtype, the bytes in the file being as they are."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    name = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    header[name]["shape"] = data.draw(st.lists(st.sampled_from([0, 1, 2, 4, 5, 2**40, 2**62]), max_size=5))
    header[name]["dtype"] = data.draw(st.sampled_from(["F64", "F32", "I64", "BOOL", "F8_E4M3", "F4"]))
    header[name]["data_offsets"] = [0, 0] if 0 in header[name]["shape"] else header[name]["data_offsets"]
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + size :])


def use(recording) -> None:
    """Ask a recording for what a reader of it shows; what cannot be had is a RegardError."""
    asked = [lambda call=call: call.map[0, 0, 0].sum() for call in recording.calls]
    asked += [
        lambda layer=layer, kind=kind: recording.map(layer, kind=kind) for kind in ("self", "cross") for layer in range(2)
    ]
    for one in (*asked, recording.__repr__, lambda: recording.words(0, "cross")):
        with contextlib.suppress(RegardError):
            one()


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_header_that_somebody_wrote_by_hand_is_refused_or_makes_maps(tmp_path, search, data):
    path = tmp_path / "crafted.reg"
    header, tensors = safetensors_file.read_file(search)
    for _ in range(data.draw(st.integers(1, 3))):
        change(header, data)
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(tensors)))
        shape = data.draw(
            st.sampled_from([(), (3,), (0, 1, 1, 7), (2**40, 0, 5, 4), (2**40, 1, 0, 7), (2, 1, 3, 7), (0, 2**20, 0, 7)])
        )
        tensors[name] = torch.zeros(shape, dtype=data.draw(st.sampled_from([torch.float64, torch.int64, torch.bool])))
    safetensors_file.write_file(path, header, tensors)
    if not data.draw(st.integers(0, 5)):
        change_tensor(path, data)
    with contextlib.suppress(DataError):
        use(load(path))
