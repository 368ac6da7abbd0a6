import pytest
import torch

import regard
from regard import ConfigError
from regard.models.transformer import Transformer
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
