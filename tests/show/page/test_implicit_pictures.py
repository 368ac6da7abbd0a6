"""The layers without a softmax on the page: their pictures and entries are those of the matrix, pooled independently."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.show.page import implicit_pictures
from regard.show.page.recording_entry import RecordingEntry, summarize_entry
from show.implicit_recordings import B, H, SiluAttention, SoftmaxAttention, pool_signed, record_implicit
from show.page.server_client import open_client
from show.page.test_single_file import START, entries

T, LONG = 11, 307  # one pixel for each entry; several entries for each pixel
FLOAT32 = 2**-23


@pytest.fixture(scope="module")
def recording():
    return record_implicit(T, SoftmaxAttention, SiluAttention)


@pytest.fixture(scope="module")
def long_recording():
    return record_implicit(LONG, SiluAttention, SiluAttention, batch=1)


def read_numbers(answer):
    status, headers, body = answer
    assert status == 200, body
    return torch.from_numpy(np.frombuffer(body, "<f4").copy()).view(*map(int, headers["x-shape"].split(","))).double()


def test_a_recording_lists_its_layers_without_a_softmax_apart(recording):
    found = summarize_entry(RecordingEntry("r1", recording))
    assert [one["name"] for one in found["implicit"]] == ["1"]
    assert [layer["name"] for one in found["attentions"] for layer in one["layers"]] == ["0"]
    (one,) = found["implicit"]
    assert one == {
        "name": "1",
        "title": recording.map(0, kind="implicit").title,
        "batch": B,
        "heads": H,
        "queries": T,
        "keys": T,
        "offset": 0,
        "words": "words",
        "rows": T,
        "columns": T,
    }
    assert not any("Not drawn" in note for note in found["notes"])


@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("name", ["recording", "long_recording"])
def test_a_picture_is_the_matrix_pooled_by_its_sign(name, how, request):
    recording = request.getfixturevalue(name)
    last, layers = recording.map(0, kind="implicit").shape[0] - 1, len(recording.layers("implicit"))
    dense = recording.map(layers - 1, kind="implicit").dense()[last, 2]
    assert (dense < 0).any()
    assert (dense > 0).any()
    size = min(implicit_pictures.PICTURE_PIXELS, len(dense))
    with open_client(recording) as client:
        path = f"/api/r/r1/implicit?layer={layers - 1}&b={last}&head=2&how={how}"
        found = read_numbers(client.ask(path))
    torch.testing.assert_close(found, pool_signed(dense, size, size, how), rtol=FLOAT32, atol=1e-12)


def test_a_place_that_does_not_exist_is_refused_in_a_sentence(recording):
    with open_client(recording) as client:
        for name, least in (("layer", 1), ("b", B), ("head", H)):
            status, said = client.expect_refusal("/api/r/r1/implicit", **{name: least, "how": "mean"})
            assert status == 400
            assert said.startswith(f"{name} must be at least 0 and below {least}")
        status, said = client.expect_refusal("/api/r/r1/implicit_cell", q=T, k=0)
        assert status == 400
        assert said.startswith(f"q must be at least 0 and below {T}")


def write_page(recording, path):
    regard.page(recording, path)
    text = path.read_text(encoding="utf-8")
    (summary,) = json.loads(START.search(text)[1])["recordings"]
    return summary, entries(text)


def test_a_file_holds_every_entry_of_short_texts(recording, tmp_path):
    summary, found = write_page(recording, tmp_path / "page.html")
    assert (summary["implicit"][0]["rows"], summary["notes"]) == (T, [])
    dense = recording.map(0, kind="implicit").dense()
    for b in range(B):
        for head in range(H):
            data = found[f"r1/implicit?layer=0&b={b}&head={head}&how=mean"]
            numbers = torch.from_numpy(np.frombuffer(data, "<f4").copy()).view(T, T).double()
            torch.testing.assert_close(numbers, dense[b, head], rtol=FLOAT32, atol=1e-12)
    assert not any("implicit" in name and "how=max" in name for name in found)


def test_a_file_of_a_recording_without_any_softmax_states_what_it_leaves_out(long_recording, tmp_path, monkeypatch):
    monkeypatch.setattr(implicit_pictures, "MAX_FILE_BYTES", 2 * 4 * 2 * 2 * 64**2)
    monkeypatch.setattr(implicit_pictures, "MAX_FILE_HEADS", 2)
    summary, found = write_page(long_recording, tmp_path / "page.html")
    assert [(one["rows"], one["columns"], one["heads"]) for one in summary["implicit"]] == [(64, 64, 3)] * 2
    assert [note.split(" of ")[0] for note in summary["notes"]] == [
        "This file contains the first 2",
        "This file contains pictures",
    ]
    dense = long_recording.map(1, kind="implicit").dense()[0, 1]
    for how in ("mean", "max"):
        data = found[f"r1/implicit?layer=1&b=0&head=1&how={how}"]
        numbers = torch.from_numpy(np.frombuffer(data, "<f4").copy()).view(64, 64).double()
        torch.testing.assert_close(numbers, pool_signed(dense, 64, 64, how), rtol=FLOAT32, atol=1e-12)
    assert "r1/implicit?layer=1&b=0&head=2&how=mean" not in found
