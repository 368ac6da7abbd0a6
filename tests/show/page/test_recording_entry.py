import json

import pytest
import torch

import regard
from regard import ConfigError
from regard.models.transformer import Transformer
from regard.observe.interception.attention_call import MissedCall
from regard.observe.stored_calls.kv_history import KVHistory
from regard.show.page import recording_entry as entries
from regard.show.page.head_table import stream_head_table
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, summarize_entry
from regard.show.page.steps_json import compute_head_steps
from show.page.server_client import in_steps, record_sorter, rows_and_keys

B, H, G, T, PAST, D = 2, 4, 2, 7, 3, 5


class Two(torch.nn.Module):
    """A layer of self-attention that continues after some keys, and one of cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Part(), Part()

    def forward(self, x, past, memory):
        self.own(x, torch.cat([past, x[:, ::2]], 2), regard.Causal(), PAST)
        return self.other(x, memory, regard.Everything(), 0)


class Part(torch.nn.Module):
    def forward(self, q, k, mask, offset):
        return regard.attention(q, k, k, mask, offset=offset)


@pytest.fixture(scope="module")
def entry():
    generator = torch.Generator().manual_seed(0)
    x, past, memory = (
        torch.randn(B, *shape, D, dtype=torch.float64, generator=generator) for shape in ((H, T), (G, PAST), (G, 11))
    )
    model = Two()
    with torch.inference_mode(), regard.record(model, keep="values") as recording:
        model(x, past, memory)
    recording.tokens = [[f"{row}{n}" for n in range(T + PAST)] for row in "ab"]
    return RecordingEntry("r1", recording)


def test_shapes_are_those_of_the_maps_that_are_not_made(entry):
    for one in entry.attention_layers:
        for layer, shape in enumerate(one.shapes):
            assert shape == entry.recording.map(layer, kind=one.kind, part=one.part).shape


def test_the_map_of_a_place_is_that_of_its_row_and_head(entry):
    for one in entry.attention_layers:
        place = HeadPlace(one.kind, one.part, 1, 0, 3)
        expected = entry.recording.map(0, 3, kind=one.kind, part=one.part)[1, 0]
        torch.testing.assert_close(entry.get_map(place)[0, 0], expected, rtol=0, atol=1e-12)


def test_values_are_those_of_the_heads_group(entry):
    one = entry.attention_layers[0]
    values = entry.recording.values(0, kind=one.kind, part=one.part)
    assert torch.equal(entry.get_values(HeadPlace(one.kind, one.part, 1, 0, 3)), values[1, 1])
    assert torch.equal(entry.get_values(HeadPlace(one.kind, one.part, 1, 0, 1)), values[1, 0])


def test_words_of_queries_are_the_last_of_those_of_the_keys():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, H, n, D, generator=generator) for n in (T, T + PAST))
    recording = rows_and_keys(q, k, offset=PAST)
    recording.tokens = [[f"{row}{n}" for n in range(T + PAST)] for row in "ab"]
    entry = RecordingEntry("r1", recording)
    rows, columns = entry.get_axis_words(HeadPlace(b=1))
    assert columns == [f"b{n}" for n in range(T + PAST)]
    assert rows == columns[PAST:]
    (found,) = summarize_entry(entry)["attentions"]
    assert (found["rows"], found["columns"]) == ("queries", "words")


def test_an_axis_whose_length_the_words_have_not_has_numbers(entry):
    one = next(one for one in entry.attention_layers if 11 in (shape[3] for shape in one.shapes))
    layer = next(layer for layer, shape in enumerate(one.shapes) if shape[3] == 11)
    assert entry.get_axis_words(HeadPlace(one.kind, one.part, 0, layer))[1] == [str(n) for n in range(11)]


def test_few_maps_are_kept_and_the_last_in_any_case(monkeypatch):
    entry = RecordingEntry("r1", record_sorter())
    monkeypatch.setattr(entries, "MAX_MAPS_BYTES", 2 * entries.ROW_BYTES * 3 * 11)
    for layer in (0, 1, 2, 0):
        entry.get_map(HeadPlace(layer=layer))
    assert [key[2] for key in entry._maps] == [2, 0]
    monkeypatch.setattr(entries, "MAX_MAPS_BYTES", 0)
    entry.get_map(HeadPlace(layer=1))
    assert [key[2] for key in entry._maps] == [1]


@pytest.mark.parametrize("limit", [0, 2**23], ids=["each head alone", "all heads of a layer"])
def test_calls_that_are_joined_have_the_map_of_all_of_them(limit, monkeypatch):
    monkeypatch.setattr(entries, "MAX_JOINED_LAYER_BYTES", limit)
    recording = in_steps()
    entry = RecordingEntry("r1", recording)
    for layer in range(2):
        for head in range(4):
            place = HeadPlace(b=1, layer=layer, head=head)
            torch.testing.assert_close(entry.get_map(place)[0, 0], recording.map(layer, head)[1, 0], rtol=0, atol=1e-12)
            assert torch.equal(entry.get_values(place), recording.values(layer)[1, head // 2])


def test_of_a_large_layer_that_is_joined_one_head_is_copied(monkeypatch):
    monkeypatch.setattr(entries, "MAX_JOINED_LAYER_BYTES", 0)
    monkeypatch.setattr(KVHistory, "build_map", counted := Counted(KVHistory.build_map))
    recording = in_steps()
    entry = RecordingEntry("r1", recording)
    m, count = entry.get_sized_map(HeadPlace(layer=1, head=3))
    assert m.nbytes == 2 * 2 * 13 * 5 * 8  # q and k of one head, of both batch rows
    assert count >= m.nbytes
    entry.get_sized_map(HeadPlace(layer=1, head=3))
    assert counted.times == 1


class Counted:
    """A method that counts how often it is called."""

    def __init__(self, method) -> None:
        self.method, self.times = method, 0

    def __get__(self, owner, kind):
        def call(*given, **more):
            self.times += 1
            return self.method(owner, *given, **more)

        return call


@pytest.mark.parametrize(("word", "count"), [("x", 2000), ("x" * 100, 327), ("x" * 10_000, 128), ("", 2000)])
def test_the_words_that_come_along_are_fewer_where_they_are_long(word, count):
    assert len(entries.select_first_words([word] * 3000)) == count


def test_what_comes_along_is_small_whatever_a_recording_says():
    recording = record_sorter()
    recording.model, recording.tokens = "m" * 10**6, ["w" * 10**6] * 11
    recording.missed += [MissedCall("kernel", "module", "reason")] * 10**4
    assert len(json.dumps(summarize_entry(RecordingEntry("r1", recording)))) < 20_000


@pytest.mark.slow
def test_heads_that_were_chosen_keep_the_models_numbers():
    entry = RecordingEntry("r1", record_sorter(heads=[0, 2]))
    (attention,) = summarize_entry(entry)["attentions"]
    assert [(layer["heads"], layer["numbers"]) for layer in attention["layers"]] == [(2, [0, 2])] * 3
    (whole,) = summarize_entry(RecordingEntry("r1", record_sorter()))["attentions"]
    assert "numbers" not in whole["layers"][0]
    place = HeadPlace(layer=1, head=1)
    torch.testing.assert_close(entry.get_map(place)[0, 0], record_sorter().map(1, 2)[0, 0], rtol=0, atol=1e-12)
    *_, last = stream_head_table(entry, place, lambda: None)
    assert last["detectors"]
    expected = next(row.kind for row in regard.heads(record_sorter()) if (row.layer, row.head) == (1, 2))
    assert entry.get_kind(place) == expected
    assert compute_head_steps(entry, place, None, 64)["title"] == "layer 1, head 2"


@pytest.mark.parametrize(
    ("places", "unit", "names"),
    [
        (regard.PatchGrid(2, 3), "patch", ["class token", *(f"patch {n // 3},{n % 3}" for n in range(6))]),
        (regard.PatchGrid(1, 5, 2, names=("a", "b")), "patch", ["a", "b", *(f"patch 0,{column}" for column in range(5))]),
        (regard.AudioFrames(0.5), "frame", [f"{n / 2:.2f} s" for n in range(T)]),
        (regard.PatchGrid(2, 3, has_queries=False), "token", None),
        (regard.PatchGrid(2, 7, order=(tuple(range(7)), tuple(range(7, 14)))), "patch", None),  # windows are batch rows
        (regard.PatchGrid(40, 40), "patch", None),  # of another layer
    ],
)
def test_without_words_patches_and_frames_have_names(places, unit, names):
    recording = rows_and_keys(torch.zeros(2, 1, T, D), torch.zeros(2, 1, T, D), regard.Everything())
    recording.places = places
    entry = RecordingEntry("r1", recording)
    found = summarize_entry(entry)
    expected = [str(n) for n in range(T)] if names is None else [name.replace(" ", "\u00a0") for name in names]
    for row in (0, 1):
        assert entry.get_axis_words(HeadPlace(b=row)) == (expected, expected)
    assert found["attentions"][0]["unit"] == unit
    assert found["text"] == ""
    assert found["words"] == ({} if names is None else {"words": {"count": T, "first": expected}})
    recording.tokens = list("abcdefg")
    named = summarize_entry(RecordingEntry("r1", recording))
    assert (named["attentions"][0]["unit"], named["text"]) == ("token", "abcdefg")


def test_a_recording_without_words_is_shown_by_numbers():
    entry = RecordingEntry("r1", rows_and_keys(torch.zeros(1, 1, T, D), torch.zeros(1, 1, T, D)))
    assert summarize_entry(entry)["words"] == {}
    assert entry.get_axis_words(HeadPlace())[0] == [str(n) for n in range(T)]


@pytest.mark.parametrize(
    "place", [HeadPlace(layer=9), HeadPlace(head=H), HeadPlace(b=B), HeadPlace(head=-1), HeadPlace("self", "nowhere")]
)
def test_a_place_that_is_not_there_is_refused(entry, place):
    with pytest.raises(ConfigError):
        entry.get_map(place)


def test_the_words_of_two_texts_go_to_the_axes_that_they_are_of():
    torch.manual_seed(0)
    model = Transformer(vocabulary=31, width=12, heads=3, layers=2).eval()
    with regard.record(model) as recording, torch.no_grad():
        model(torch.randint(31, (2, 5)), [5, 4], torch.randint(31, (2, 5)))
    source, target = [list("abcde"), list("fghij")], [list("klmno"), list("pqrst")]
    recording.tokens = {"rows": target, "columns": source}
    one = RecordingEntry("r1", recording)
    for kind, part, rows, columns in (
        ("self", "encoder", source, source),
        ("self", "decoder", target, target),
        ("cross", "decoder", target, source),
    ):
        for b in range(2):
            assert one.get_axis_words(HeadPlace(kind, part, b)) == (rows[b], columns[b])
