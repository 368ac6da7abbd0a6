import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import regard
from execution_counts import count_calls, count_lines
from models.translators import make_translator, sentences
from observe.models import bart, gpt2, llama, words
from regard import Causal, ConfigError, DataError, Documents, Given, Padding, Prefix, Window
from regard.generate.translation_search import translate
from regard.observe import Recording, load, record
from regard.observe.files import safetensors_file
from regard.observe.files.checksums import compute_header_checksum
from regard.observe.files.mask_serialization import MaskReader, serialize_mask
from regard.observe.files.serialize import NamedTensors
from regard.observe.interception.attention_call import MissedCall
from regard.observe.stored_calls.tensor_store import Store


def record_beams() -> Recording:
    """A prompt and steps of three beams, whose rows have moved, and words for the axes."""
    model = gpt2()
    with record(model) as recording:
        model.generate(words(2, 11), max_new_tokens=7, num_beams=3, do_sample=False, pad_token_id=0)
    recording.tokens = [f"«{n}»" for n in range(18)]
    return recording


def assert_equal_recordings(a: Recording, b: Recording) -> None:
    assert (a.model, a.names, a.tokens, a.missed) == (b.model, b.names, b.tokens, b.missed)
    assert len(a.runs) == len(b.runs)
    for mine, theirs in zip(a.calls, b.calls, strict=True):
        assert (mine.name, mine.kind, mine.step) == (theirs.name, theirs.kind, theirs.step)
        assert_equal_maps(mine.map, theirs.map)
    for layer in range(len(a.layers())):
        assert_equal_maps(a.map(layer), b.map(layer))


def assert_equal_maps(mine, theirs):
    """Of queries, keys and rules that are equal to the bit; a product of them may round by where in memory they lie."""
    for name in ("q", "k", "bias", "sinks"):
        x, y = (getattr(one.planes.request, name) for one in (mine, theirs))
        assert (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype)
    for name in ("scale", "softcap", "offset"):
        assert getattr(mine.planes.request, name) == getattr(theirs.planes.request, name)
    rules = (one.planes.request.mask.table(*one.shape[2:], one.planes.request.offset) for one in (mine, theirs))
    assert torch.equal(*rules)


def test_a_recording_comes_back_to_the_bit(tmp_path):
    recording = record_beams()
    recording.save(tmp_path / "generated.reg")
    assert_equal_recordings(recording, load(tmp_path / "generated.reg"))


def test_a_recording_read_from_a_file_can_be_saved_again(tmp_path):
    record_beams().save(tmp_path / "once.reg")
    load(tmp_path / "once.reg").save(tmp_path / "twice.reg")
    assert_equal_recordings(load(tmp_path / "once.reg"), load(tmp_path / "twice.reg"))


def test_both_sides_of_an_encoder_decoder_come_back_with_padding_values_and_what_was_missed(tmp_path):
    model, source = bart(), words(2, 13)
    seen = torch.ones_like(source)
    seen[1, 9:] = 0
    with record(model, keep="values") as recording:
        model(source, attention_mask=seen, decoder_input_ids=words(2, 5))
    recording.missed.append(MissedCall("a kernel", "a.module", "a reason"))
    recording.save(tmp_path / "both.reg")
    found = load(tmp_path / "both.reg")
    assert_equal_recordings(recording, found)
    for kind, part in (("self", "encoder"), ("self", "decoder"), ("cross", "decoder")):
        assert_equal_maps(found.map(1, kind=kind, part=part), recording.map(1, kind=kind, part=part))
        assert torch.equal(found.values(1, kind, part), recording.values(1, kind, part))


def test_half_precision_and_some_heads_of_grouped_keys_come_back(tmp_path):
    model = llama()
    with record(model, keep="bfloat16", heads=[1, 4]) as recording:
        model(words(2, 11))
    recording.save(tmp_path / "half.reg")
    assert_equal_recordings(recording, load(tmp_path / "half.reg"))
    assert load(tmp_path / "half.reg").calls[0].map.shape == (2, 2, 11, 11)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list what a process has mapped")
@pytest.mark.parametrize("is_large", [True, False])
def test_tensors_are_mapped_from_a_large_file_and_do_not_depend_on_any_other(tmp_path, monkeypatch, is_large):
    model = gpt2()
    with record(model) as recording:
        model(words(1, 512))
    recording.save(tmp_path / "mapped.reg")
    if is_large:
        monkeypatch.setattr(safetensors_file, "MOST_READ_BYTES", 1000)
    for verify in (True, False):
        found = load(tmp_path / "mapped.reg", verify=verify)
        with open("/proc/self/maps") as maps:
            assert any("mapped.reg" in line for line in maps) is is_large
        assert_equal_maps(found.map(2), recording.map(2))
    if not is_large:
        os.truncate(tmp_path / "mapped.reg", 0)
    assert_equal_maps(found.map(2), recording.map(2))


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
    packed = NamedTensors()
    written = json.loads(json.dumps(serialize_mask(rule, 5, 7, 1, packed)))
    assert torch.equal(MaskReader(packed.tensors).deserialize_mask(written).table(5, 7, 1), rule.table(5, 7, 1))


class Diagonal(regard.mechanism.mask_algebra.Mask):
    """A rule that only this test knows."""

    def can_see(self, b, h, i, j, offset=0):
        return i + offset == j

    def find_possible_keys(self, rows, keys):
        return ((rows.first, rows.last + 1),)

    def find_certain_keys(self, rows, keys):
        return ()


def test_a_rule_of_someones_own_is_written_out_as_its_table():
    packed = NamedTensors()
    written = serialize_mask(Diagonal(), 5, 7, 1, packed)
    assert torch.equal(MaskReader(packed.tensors).deserialize_mask(written).table(5, 7), Diagonal().table(5, 7, 1))


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rewrite(path, header, rest):
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + rest)


def alter(path, change):
    """Change the header of a recording as one who knows the format could, checksum and all."""
    header, rest = header_of(path)
    metadata = header["__metadata__"]
    own = json.loads(metadata["recording"])
    metadata["recording"] = json.dumps(change(own) or own)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata["checksum"] = compute_header_checksum(
            {name: metadata[name] for name in metadata if name != "checksum"}, tensors
        )
    rewrite(path, header, rest)


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
        (lambda own: piece(own).update(mask=nest_rule(200)), "deeply"),
        (lambda own: piece(own).update(q=next(iter(own["runs"][0]["turns"].values()))), "four axes"),
    ],
)
def test_a_hostile_header_is_refused_in_a_sentence(tmp_path, change, says):
    path = tmp_path / "hostile.reg"
    record_beams().save(path)
    alter(path, lambda own: change(own) and None)
    with pytest.raises(DataError, match=r"hostile\.reg is not a recording that regard wrote, or it is damaged") as error:
        load(path)
    assert says in str(error.value)


def nest_rule(depth):
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
    path, model = tmp_path / "hostile.reg", make_translator("additive")
    with record(model) as recording:
        translate(model, sentences(4, 9), beams=3, end=5, longest=6)
    recording.save(path)
    assert load(path).map(0, kind="cross").shape[0] == 6
    alter(path, lambda own: change(own) and None)
    with pytest.raises(DataError, match=r"hostile\.reg is not a recording that regard wrote, or it is damaged") as error:
        load(path)
    assert says in str(error.value)


def test_a_newer_a_foreign_and_a_missing_file_are_refused_for_what_they_are(tmp_path):
    path = tmp_path / "new.reg"
    record_beams().save(path)
    header, rest = header_of(path)
    header["__metadata__"]["version"] = "9"
    rewrite(path, header, rest)
    with pytest.raises(DataError, match="recording of version 9, and this regard reads up to 8"):
        load(path)
    header["__metadata__"]["format"] = "pt"
    rewrite(path, header, rest)
    with pytest.raises(DataError, match="safetensors file, but not a recording"):
        load(path)
    with pytest.raises(DataError, match="is not a file"):
        load(tmp_path / "absent.reg")
    path.write_text("a text, and no recording at all")
    with pytest.raises(DataError, match="not a recording"):
        load(path)


def test_an_altered_number_is_refused_and_read_as_it_is_where_that_is_requested(tmp_path):
    path = tmp_path / "altered.reg"
    recording = record_beams()
    recording.save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"altered\.reg is damaged: the numbers of its tensor 't\d+' have changed .*verify=False"
    ):
        load(path)
    assert load(path, verify=False).names == recording.names
    rewrite_header(path, "version", "9")
    with pytest.raises(DataError, match="recording of version 9"):
        load(path, verify=False)
    rewrite_header(path, "version", "3")
    rewrite_header(path, "recording", json.dumps({**json.loads(read_metadata(path)["recording"]), "model": "another"}))
    with pytest.raises(DataError, match="its header has changed since it was written"):
        load(path, verify=False)


def read_metadata(path):
    return header_of(path)[0]["__metadata__"]


def rewrite_header(path, name, value):
    header, rest = header_of(path)
    header["__metadata__"][name] = value
    rewrite(path, header, rest)


def test_a_file_of_before_there_were_checksums_is_read(tmp_path):
    path, recording = tmp_path / "old.reg", record_beams()
    recording.save(path)
    header, rest = header_of(path)
    for name in ("checksum", "checksums"):
        del header["__metadata__"][name]
    header["__metadata__"]["version"] = "2"
    rewrite(path, header, rest)
    assert_equal_recordings(recording, load(path))
    rewrite_header(path, "version", "3")  # of which there is none without
    with pytest.raises(DataError, match="checksum"):
        load(path)


def write_crafted_file(path, tensors, pieces, turns=None, keys=None, kind="self"):
    """A recording of one strand whose header was written by hand."""
    piece = dict.fromkeys(("q", "values", "bias", "sinks", "weight", "softcap"))
    piece |= {"q": "q", "first": 0, "stop": 5, "step": 0, "scale": 1.0, "offset": 0, "mask": ["Causal"]}
    strand = {"key": ["a", kind, 0, 0], "name": "a", "kind": kind, "past": 0, "heads": None, "keys": keys or [["k", 0]]}
    strand["pieces"] = [{**piece, **one} for one in pieces]
    run = {"turns": turns or {}, "strands": [strand], "calls": [[0, n] for n in range(len(pieces))]}
    safetensors_file.write_file(path, {"model": "m", "tokens": None, "missed": [], "runs": [run]}, tensors)
    return path


FEW = {"q": torch.zeros(2, 3, 5, 7), "k": torch.zeros(2, 3, 5, 7), "rows": torch.tensor([1, 0])}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pieces": [{}, {"step": 2**62}]}, "from 0 to"),
        ({"pieces": [{}], "keys": [["k", 2**62]]}, "from 0 to"),
        ({"pieces": [{}], "turns": {str(2**62): "rows"}}, "from 0 to"),
        ({"pieces": [{}], "turns": {"-1": "rows"}}, "from 0 to"),
        ({"pieces": [{"step": n} for n in range(50_000)]}, "a call with 5 keys continues one with 5"),
        (
            {"pieces": [{}], "tensors": {"q": torch.empty(2**40, 0, 5, 4), "k": torch.empty(2**40, 0, 5, 4)}},
            "expected batch rows",
        ),
        (
            {"pieces": [{}], "tensors": {"q": torch.empty(2**40, 1, 0, 4), "k": torch.empty(2**40, 1, 5, 0)}},
            "expected batch rows",
        ),
        ({"pieces": [{"stop": 2**31 - 1}]}, "got 5"),
        ({"pieces": [{"mask": ["Padding", [5] * 9]}]}, "does not fit"),
        ({"pieces": [{"offset": [1, 2, 3]}]}, "3 offsets do not fit 2 batch rows"),
        ({"pieces": [{"values": "rows"}]}, "floating"),
        (
            {"pieces": [{"step": 1}, {"step": 0, "stop": 6}], "turns": {"1": "rows"}, "keys": [["k", 0], ["k", 1]]},
            "order of their",
        ),
    ],
)
def test_a_header_written_by_hand_is_refused_for_what_it_says(tmp_path, given, says):
    with pytest.raises(DataError, match=says):
        load(write_crafted_file(tmp_path / "crafted.reg", given.pop("tensors", FEW) | {"rows": FEW["rows"]}, **given))


@pytest.mark.slow
def test_ten_times_as_many_calls_keys_turns_and_rules_take_about_ten_times_the_work(tmp_path):
    def work(count):
        keys, turns = [["k", n] for n in range(count)], {str(n): "rows" for n in range(1, count)}
        pieces = [{"step": n, "stop": 5 * n + 5, "mask": ["Or", ["Causal"], ["Prefix", 3]]} for n in range(count)]
        path = write_crafted_file(tmp_path / f"{count}.reg", FEW, pieces, turns, keys)
        return count_calls("from regard.observe import load", f"load({str(path)!r})")

    assert work(2_000) < 15 * work(200)


def test_a_rule_that_many_calls_have_is_made_once(tmp_path):
    ids = {"ids": torch.zeros(5, dtype=torch.int64)}
    rule = {"mask": ["And", ["Causal"], ["Documents", "ids", None]]}
    path = write_crafted_file(tmp_path / "rules.reg", FEW | ids, [rule] * 7, kind="cross")
    assert len({id(call.stored.mask) for call in load(path).calls}) == 1


def write_distant_calls(path, step):
    """Write a recording whose second call has a step, the first one step 0."""
    return write_crafted_file(path, FEW, [{}, {"step": step, "stop": 10}], {"7": "rows"}, [["k", 0], ["k", step]])


@pytest.mark.slow
def test_a_step_far_from_the_one_before_takes_no_more_work(tmp_path):
    def work(step):
        path = write_distant_calls(tmp_path / f"{step}.reg", step)
        return count_lines("from regard.observe import load", f"load({str(path)!r}).map(0)")

    assert work(10_000) < 1.1 * work(10)


def test_a_step_may_be_as_far_from_the_one_before_as_numbers_go(tmp_path):
    assert load(write_distant_calls(tmp_path / "far.reg", 2**31 - 1)).map(0).shape == (2, 3, 10, 10)


def test_of_threads_that_save_one_path_each_succeeds_and_a_reader_finds_one_of_their_recordings(tmp_path):
    path = tmp_path / "one.reg"
    recordings = []
    for tokens in (3, 5):
        model = gpt2()
        with record(model) as recording:
            model(words(1, tokens))
        recordings.append(recording)
    recordings[0].save(path)
    with ThreadPoolExecutor(4) as threads:
        saved = [threads.submit(recordings[n % 2].save, path) for n in range(40)]
        while not all(one.done() for one in saved):
            assert load(path).map(0).shape[2] in (3, 5)
    assert [one.exception() for one in saved] == [None] * 40
    assert os.listdir(tmp_path) == ["one.reg"]


def test_two_recordings_into_one_folder_do_not_write_over_each_other(tmp_path):
    stores = [Store.from_arguments(None, tmp_path / "kept") for _ in range(2)]
    x = torch.randn(2**16)
    first = stores[0].copy_tensor(x)
    with pytest.raises(ConfigError, match="another recording writes to that folder"):
        stores[1].copy_tensor(-x)
    assert torch.equal(first, x)


def test_a_full_disk_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "kept.reg"
    path.write_bytes(b"what was there")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "save_file", full)
    with pytest.raises(DataError, match=r"could not be written to .*No space left on device.*Nothing was changed"):
        record_beams().save(path)
    assert path.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["kept.reg"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="existing folder"):
        record_beams().save(tmp_path / "absent" / "x.reg")
