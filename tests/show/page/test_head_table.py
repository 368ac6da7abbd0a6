import pytest

import regard
from show.page.asking import asking

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


def test_heads_are_those_of_the_table(client, recording):
    *lines, last = client.lines("/api/r/r1/heads", kind="self")
    expected = regard.heads(recording)
    assert [line["done"] for line in lines] == list(range(1, 10))
    assert [line["row"]["kind"] for line in lines] == [row.kind for row in expected]
    assert last["detectors"] == list(expected.detectors)
    assert lines[5]["row"]["scores"] == pytest.approx(dict(expected[5].scores), rel=1e-10, nan_ok=True)
    assert client.lines("/api/r/r1/open", **HEAD)[-1]["kind"] == expected[5].kind


def test_large_heads_are_typed_one_by_one_and_alike(recording, monkeypatch):
    monkeypatch.setattr("regard.show.page.head_table.MAX_LAYER_WEIGHTS", 10)
    with asking(recording) as client:
        rows = [line["row"] for line in client.lines("/api/r/r1/heads")[:-1]]
    for found, row in zip(rows, regard.heads(recording), strict=True):
        assert found["scores"] == pytest.approx(dict(row.scores), rel=1e-10)
        assert (found["layer"], found["head"], found["kind"]) == (row.layer, row.head, row.kind)
