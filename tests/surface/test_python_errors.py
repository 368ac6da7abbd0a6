"""What is not there raises what a list or a dictionary raises too; and text that no encoding has is shown escaped."""

import pytest
import torch

import regard
from regard.map import Pyramid
from surface.map_calls import a_map
from surface.model_calls import gpt2
from surface.observe_calls import record_layer, table

OUT_OF_RANGE = {
    "a batch row of a map": lambda: a_map()[9],
    "a query of a map": lambda: a_map()[0, 0, 5],
    "a key of a map, from the end": lambda: a_map()[0, 0, 0, -8],
    "a head that is selected": lambda: a_map().select(heads=2),
    "keys whose mass is asked": lambda: a_map().mass([0, 7]),
    "a tile of a pyramid": lambda: Pyramid(a_map()).tile(0, 1, 0),
    "a level of a pyramid": lambda: Pyramid(a_map()).tile(9, 0, 0),
    "a head of a pyramid": lambda: Pyramid(a_map(), 0, 2),
    "a layer of a recording": lambda: record_layer().map(1),
    "a layer of a recording, from the end": lambda: record_layer().map(-2),
    "a head of a recording": lambda: record_layer().map(0, 2),
    "a layer of a table of heads": lambda: regard.heads(record_layer(), layers=[1]),
    "a row of a table of heads": lambda: table()[2],
    "a query of rollout": lambda: regard.rollout(record_layer(), [5]),
    "a query that is compared": lambda: regard.compare(record_layer(), record_layer(), queries=[5]),
    "a batch row of a figure": lambda: regard.figure(record_layer(), 0, 0, row=1),
    "a token of a model": lambda: gpt2()(torch.tensor([[60_000]])),
}
MISSING = {
    "a module of a recording": lambda: record_layer()["nowhere"],
    "a layer by its name": lambda: record_layer().map("nowhere"),
    "a part": lambda: record_layer().map(0, part="nowhere"),
    "a kind": lambda: record_layer().map(0, kind="nowhere"),
    "a score": lambda: table().sort_by("nowhere"),
    "a layer of a table of heads": lambda: regard.heads(record_layer(), layers=["nowhere"]),
    "a way to pool": lambda: a_map().pooled(1, 1, "nowhere"),
}


@pytest.mark.parametrize("what", OUT_OF_RANGE)
def test_what_is_out_of_range_is_an_index_error_too(what):
    with pytest.raises(regard.RegardError) as caught:
        OUT_OF_RANGE[what]()
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("what", MISSING)
def test_a_name_that_is_missing_is_a_key_error_too(what):
    with pytest.raises(regard.RegardError) as caught:
        MISSING[what]()
    assert isinstance(caught.value, KeyError)
    assert not str(caught.value).startswith(("'", '"'))


def test_a_recording_is_iterated_as_a_dictionary_of_its_modules():
    recording = record_layer()
    assert list(recording) == recording.names
    assert all(name in recording for name in recording)
    assert "nowhere" not in recording
    assert [call.name for name in recording for call in recording[name]] == recording.names


def test_the_rows_of_a_table_are_counted_as_those_of_a_list():
    found = table()
    assert [row.head for row in found] == [found[n].head for n in range(len(found))] == [0, 1]
    assert found[-1] == found[1]
    assert list(found[0:1]) == [found[0]]


def test_words_that_no_encoding_has_are_shown_escaped(tmp_path):
    layer = regard.MultiHeadAttention(4, 6, 9, 0.0, 2)
    with regard.record(layer) as recording:
        layer(torch.randn(1, 5, 4))
    recording.tokens = ["\ud800", "a", "\udfff", "\ud800", "b"]
    heads = regard.heads(recording)
    assert heads[0].scores["duplicate"] == heads[0].scores["duplicate"]  # a number: the lone surrogates are one word
    shown = [str(heads), str(regard.compare(recording, recording)), heads._repr_html_() or "", recording._repr_html_() or ""]
    for text in shown:
        text.encode("utf-8")
    regard.figure(recording, 0, 0, title="\ud800").canvas.draw()
    regard.page(recording, tmp_path / "page.html")
    (tmp_path / "page.html").read_text(encoding="utf-8")
    recording.save(tmp_path / "kept.regard")
    assert list(regard.load(tmp_path / "kept.regard").tokens) == recording.tokens
