import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from models.translators import made, sentences
from observe.models import bart, gpt2, llama, words
from regard import Causal, DataError, Documents, Given, Padding, Prefix, Window
from regard.generate.translation import translate
from regard.observe import Recording, files, load, record
from regard.observe.doors.passage import Missed
from regard.observe.packing import Packed, pack_rule
from regard.observe.unpacking import unpack_rule


def recorded() -> Recording:
    """A prompt and steps of three beams, whose rows have moved, and words for the axes."""
    model = gpt2()
    with record(model) as recording:
        model.generate(words(2, 11), max_new_tokens=7, num_beams=3, do_sample=False, pad_token_id=0)
    recording.tokens = [f"«{n}»" for n in range(18)]
    return recording


def same(a: Recording, b: Recording) -> None:
    assert (a.model, a.names, a.tokens, a.missed) == (b.model, b.names, b.tokens, b.missed)
    assert len(a.runs) == len(b.runs)
    for mine, theirs in zip(a.calls, b.calls, strict=True):
        assert (mine.name, mine.kind, mine.step) == (theirs.name, theirs.kind, theirs.step)
        same_map(mine.map, theirs.map)
    for layer in range(len(a.layers())):
        same_map(a.map(layer), b.map(layer))


def same_map(mine, theirs):
    """Of queries, keys and rules that are equal to the bit; a product of them may round by where in memory they lie."""
    for name in ("q", "k", "bias", "sinks"):
        x, y = (getattr(one._request, name) for one in (mine, theirs))
        assert (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype)
    for name in ("scale", "softcap", "offset"):
        assert getattr(mine._request, name) == getattr(theirs._request, name)
    rules = (one._request.mask.table(*one.shape[2:], one._request.offset) for one in (mine, theirs))
    assert torch.equal(*rules)


def test_a_recording_comes_back_to_the_bit(tmp_path):
    recording = recorded()
    recording.save(tmp_path / "generated.reg")
    same(recording, load(tmp_path / "generated.reg"))


def test_a_recording_read_from_a_file_can_be_saved_again(tmp_path):
    recorded().save(tmp_path / "once.reg")
    load(tmp_path / "once.reg").save(tmp_path / "twice.reg")
    same(load(tmp_path / "once.reg"), load(tmp_path / "twice.reg"))


def test_both_sides_of_an_encoder_decoder_come_back_with_padding_values_and_what_was_missed(tmp_path):
    model, source = bart(), words(2, 13)
    seen = torch.ones_like(source)
    seen[1, 9:] = 0
    with record(model, keep="values") as recording:
        model(source, attention_mask=seen, decoder_input_ids=words(2, 5))
    recording.missed.append(Missed("a kernel", "a.module", "a reason"))
    recording.save(tmp_path / "both.reg")
    found = load(tmp_path / "both.reg")
    same(recording, found)
    for kind, part in (("self", "encoder"), ("self", "decoder"), ("cross", "decoder")):
        same_map(found.map(1, kind=kind, part=part), recording.map(1, kind=kind, part=part))
        assert torch.equal(found.values(1, kind, part), recording.values(1, kind, part))


def test_half_precision_and_some_heads_of_grouped_keys_come_back(tmp_path):
    model = llama()
    with record(model, keep="bfloat16", heads=[1, 4]) as recording:
        model(words(2, 11))
    recording.save(tmp_path / "half.reg")
    same(recording, load(tmp_path / "half.reg"))
    assert load(tmp_path / "half.reg").calls[0].map.shape == (2, 2, 11, 11)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process has mapped")
def test_tensors_are_mapped_from_the_file_rather_than_read(tmp_path):
    model = gpt2()
    with record(model) as recording:
        model(words(1, 512))
    recording.save(tmp_path / "mapped.reg")
    found = load(tmp_path / "mapped.reg")
    with open("/proc/self/maps") as maps:
        assert any("mapped.reg" in line for line in maps)
    same_map(found.map(2), recording.map(2))


RULES = st.recursive(
    st.sampled_from(
        [
            regard.Everything(),
            Causal(),
            Window(3, None),
            Window(None, 2),
            Prefix(4),
            Padding([5, 7]),
            Documents([0, 0, 1, 1, 1, 2, 2]),
            Documents([[0, 1, 1, 2, 2]], [[0, 1, 1, 2, 2, 2, 0]]),
            Given(torch.arange(35).view(5, 7) % 3 > 0),
        ]
    ),
    lambda inner: (
        st.builds(lambda a, b: a & b, inner, inner) | st.builds(lambda a, b: a | b, inner, inner) | inner.map(lambda a: ~a)
    ),
    max_leaves=6,
)


@given(rule=RULES)
@settings(deadline=None)
def test_every_rule_has_a_form_in_words_that_means_the_same(rule):
    packed = Packed()
    written = json.loads(json.dumps(pack_rule(rule, 5, 7, 1, packed)))
    assert torch.equal(unpack_rule(written, packed.tensors, 64).table(5, 7, 1), rule.table(5, 7, 1))


class Diagonal(regard.mechanism.rule.Mask):
    """A rule that only this test knows."""

    def sees(self, b, h, i, j, offset=0):
        return i + offset == j

    def may(self, rows, keys):
        return ((rows.first, rows.last + 1),)

    def must(self, rows, keys):
        return ()


def test_a_rule_of_someones_own_is_written_out_as_its_table():
    packed = Packed()
    written = pack_rule(Diagonal(), 5, 7, 1, packed)
    assert torch.equal(unpack_rule(written, packed.tensors, 64).table(5, 7), Diagonal().table(5, 7, 1))


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rewritten(path, header, rest):
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + rest)


def altered(path, change):
    """The file with its own header changed."""
    header, rest = header_of(path)
    own = json.loads(header["__metadata__"]["recording"])
    header["__metadata__"]["recording"] = json.dumps(change(own) or own)
    rewritten(path, header, rest)


def piece(own):
    """The first call in a header."""
    return own["runs"][0]["strands"][0]["pieces"][0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: own.pop("runs"), "runs"),
        (lambda own: own.update(model=3), "text"),
        (lambda own: own["runs"][0]["calls"].append([99, 0]), "range"),
        (lambda own: own["runs"][0]["calls"].append([-1, 0]), "from 0"),
        (lambda own: piece(own).update(q="t999"), "t999"),
        (lambda own: piece(own).update(stop=10**9), "keys"),
        (lambda own: piece(own).update(scale=1e999), "finite"),
        (lambda own: piece(own).update(softcap=-1.0), "softcap"),
        (lambda own: piece(own).update(offset=2**80), "whole number"),
        (lambda own: piece(own).update(mask=["Given", piece(own)["q"]]), "bool"),
        (lambda own: piece(own).update(mask=["__import__", "os"]), "__import__"),
        (lambda own: piece(own).update(mask=["Window", -3, None]), "at least 0"),
        (lambda own: own["runs"][0]["strands"][0].update(kind="sideways"), "self or cross"),
        (lambda own: piece(own).update(mask=nested(200)), "deeply"),
        (lambda own: piece(own).update(q=next(iter(own["runs"][0]["turns"].values()))), "four axes"),
    ],
)
def test_a_hostile_header_is_refused_in_a_sentence(tmp_path, change, says):
    path = tmp_path / "hostile.reg"
    recorded().save(path)
    altered(path, lambda own: change(own) and None)
    with pytest.raises(DataError, match=r"hostile\.reg is not a recording that regard wrote, or it is damaged") as error:
        load(path)
    assert says in str(error.value)


def nested(depth):
    rule = ["Causal"]
    for _ in range(depth):
        rule = ["Not", rule]
    return rule


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: piece(own).update(weight=piece(own)["q"]), "weight"),
        (lambda own: own["runs"][0]["turns"].update({"1": own["runs"][0]["turns"]["3"]}), "batch rows"),
        (lambda own: own["runs"][0]["turns"].pop("1"), "batch rows"),
        (lambda own: own.update(tokens={"rows": ["a"]}), "columns"),
    ],
)
def test_a_hostile_header_of_a_search_is_refused_too(tmp_path, change, says):
    path, model = tmp_path / "hostile.reg", made("additive")
    with record(model) as recording:
        translate(model, sentences(4, 9), beams=3, end=5, longest=6)
    recording.save(path)
    assert load(path).map(0, kind="cross").shape[0] == 6
    altered(path, lambda own: change(own) and None)
    with pytest.raises(DataError, match=r"hostile\.reg is not a recording that regard wrote, or it is damaged") as error:
        load(path)
    assert says in str(error.value)


def test_a_newer_a_foreign_and_a_missing_file_are_refused_for_what_they_are(tmp_path):
    path = tmp_path / "new.reg"
    recorded().save(path)
    header, rest = header_of(path)
    header["__metadata__"]["version"] = "3"
    rewritten(path, header, rest)
    with pytest.raises(DataError, match="recording of version 3, and this regard reads up to 2"):
        load(path)
    header["__metadata__"]["format"] = "pt"
    rewritten(path, header, rest)
    with pytest.raises(DataError, match="safetensors file, but no recording"):
        load(path)
    with pytest.raises(DataError, match="is no file"):
        load(tmp_path / "absent.reg")
    path.write_text("a text, and no recording at all")
    with pytest.raises(DataError, match="not a recording"):
        load(path)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_truncated_or_scratched_file_is_a_data_error_or_what_it_was(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "scratched.reg"
    if not path.with_suffix(".whole").exists():
        recorded().save(path.with_suffix(".whole"))
    whole = bytearray(path.with_suffix(".whole").read_bytes())
    if data.draw(st.booleans()):
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, min(len(whole), 20_000) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        found = load(path)
    except DataError:
        return
    assert all(call.map.shape[0] for call in found.calls)


def test_a_full_disk_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "kept.reg"
    path.write_bytes(b"what was there")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(DataError, match=r"could not be written to .*No space left on device.*Nothing was changed"):
        recorded().save(path)
    assert path.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["kept.reg"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="folder that exists"):
        recorded().save(tmp_path / "absent" / "x.reg")
