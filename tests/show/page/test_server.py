import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

import regard
from regard import Causal, ConfigError
from regard.map.codes import coded
from regard.show.page import desk as desks
from regard.show.page import session as sessions
from regard.show.page.entry import Place
from regard.show.page.server import server
from show.page.asking import TEXT, Client, asking, of_two_parts, recorded, rows_and_keys, sorter

HEAD = {"kind": "self", "b": 0, "layer": 1, "head": 2}


@pytest.fixture(scope="module")
def recording():
    return recorded(keep="values")


@pytest.fixture(scope="module")
def client(recording):
    with asking(recording, speaker=sorter()) as found:
        yield found


def weights(recording, layer=1, head=2):
    return recording.map(layer, head)[0, 0]


def test_the_page_and_its_files_are_served(client):
    for path, kind in (("/", "text/html"), ("/static/main.js", "text/javascript"), ("/static/style.css", "text/css")):
        status, headers, body = client.ask(path)
        assert (status, headers["content-type"].split(";")[0]) == (200, kind)
        assert body


@pytest.mark.parametrize(
    "path", ["/static/", "/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/favicon.ico"]
)
def test_nothing_else_is(client, path):
    assert client.refused(path)[0] == 404


def test_the_start_says_what_there_is(client, recording):
    start = client.json("/api/start")
    assert start["model"] == "sorter"
    assert start["writes"] is True
    assert start["version"] == regard.__version__
    assert [one["name"] for one in start["examples"]][:2] == ["simple", "trainable"]
    assert len(start["sentences"]) == 3
    summary = start["recordings"][0]
    assert summary["id"] == "r1"
    assert summary["text"] == TEXT
    assert summary["words"]["words"] == {"count": 11, "first": list(TEXT)}
    assert summary["values"] is True
    attention = summary["attentions"][0]
    assert (attention["kind"], attention["part"], attention["rows"], attention["columns"]) == ("self", None, "words", "words")
    expected = [{"name": name, "heads": 3, "queries": 11, "keys": 11} for name in recording.layers()]
    assert attention["layers"] == expected


def test_words_come_in_parts(client):
    assert client.json("/api/r/r1/words", list="words", **{"from": 3, "to": 7})["words"] == list(TEXT[3:7])


def test_tiles_are_the_map_in_codes(client, recording):
    expected = coded(weights(recording), Causal().table(11, 11).reshape(11, 11)).to(torch.int32)
    for how in ("mean", "max"):
        assert torch.equal(client.codes("/api/r/r1/tile", **HEAD, level=0, row=0, column=0, how=how), expected)


def test_rows_and_columns_are_the_map_in_codes(client, recording):
    seen = Causal().table(11, 11).reshape(11, 11)
    found = weights(recording)
    assert torch.equal(client.codes("/api/r/r1/row", **HEAD, q=7), coded(found[7], seen[7]).to(torch.int32))
    assert torch.equal(client.codes("/api/r/r1/column", **HEAD, k=4), coded(found[:, 4], seen[:, 4]).to(torch.int32))


def test_several_heads_are_their_mean(client, recording):
    mean = recording.map(1)[0, [0, 2]].mean(0)
    apart = client.codes("/api/r/r1/row", **HEAD, q=7, heads="0,2") - coded(mean[7]).to(torch.int32)
    assert apart.abs().max() <= 1
    apart = client.codes("/api/r/r1/column", **HEAD, k=4, heads="0,2") - coded(mean[:, 4]).to(torch.int32)
    assert apart.abs().max() <= 1


def test_a_cell_is_the_weight_to_the_bit_with_its_score_and_rank(client, recording):
    found, row = client.json("/api/r/r1/cell", **HEAD, q=7, k=4), weights(recording)[7]
    assert found["weight"] == float(row[4])
    assert found["rank"] == 1 + int((row > row[4]).sum())
    assert (found["of"], found["visible"]) == (8, True)
    scores = torch.tensor([client.json("/api/r/r1/cell", **HEAD, q=7, k=k)["score"] for k in range(8)])
    torch.testing.assert_close(scores.softmax(-1), row[:8])


def test_a_hidden_cell_has_no_score_and_no_rank(client):
    found = client.json("/api/r/r1/cell", **HEAD, q=4, k=7)
    assert found == {"weight": 0.0, "score": None, "rank": None, "of": 5, "visible": False}


def test_the_largest_of_a_row_and_of_a_column_come_with_their_words(client, recording):
    for axis, line in (("q", weights(recording)[7]), ("k", weights(recording)[:, 4])):
        values, places = line.topk(3)
        found = client.json("/api/r/r1/top", **HEAD, **{axis: 7 if axis == "q" else 4}, n=3)["found"]
        assert [one["place"] for one in found] == places.tolist()
        assert [one["weight"] for one in found] == pytest.approx(values.tolist())
        assert [one["word"] for one in found] == [TEXT[place] for place in places.tolist()]


def test_small_pictures_are_the_largest_weights(client, recording):
    found = client.codes("/api/r/r1/thumbs", kind="self", b=0, layer=1)
    seen = Causal().table(11, 11).reshape(11, 11)
    for head in range(3):
        assert torch.equal(found[head], coded(weights(recording, 1, head), seen).to(torch.int32))


def test_opening_a_head_ends_with_its_size_and_profiles(client, recording):
    *shares, last = client.lines("/api/r/r1/open", **HEAD)
    assert all(0 < one["done"] <= 1 for one in shares)
    assert (last["levels"], last["queries"], last["keys"]) == (1, 11, 11)
    head = recording.map(1, 2)
    assert last["rows"]["entropy"] == pytest.approx(head.entropy()[0, 0].tolist(), abs=1e-6)
    assert last["columns"]["received"] == pytest.approx(head.received()[0, 0].tolist(), abs=1e-6)


def test_heads_are_those_of_the_table(client, recording):
    *lines, last = client.lines("/api/r/r1/heads", kind="self")
    expected = regard.heads(recording)
    assert [line["done"] for line in lines] == list(range(1, 10))
    assert [line["row"]["kind"] for line in lines] == [row.kind for row in expected]
    assert last["detectors"] == list(expected.detectors)
    assert lines[5]["row"]["scores"] == pytest.approx(dict(expected[5].scores), nan_ok=True)
    assert client.lines("/api/r/r1/open", **HEAD)[-1]["kind"] == expected[5].kind


def test_large_heads_are_typed_one_by_one_and_alike(recording, monkeypatch):
    monkeypatch.setattr("regard.show.page.kinds.APART", 10)
    with asking(recording) as client:
        rows = [line["row"] for line in client.lines("/api/r/r1/heads")[:-1]]
    for found, row in zip(rows, regard.heads(recording), strict=True):
        assert found["scores"] == pytest.approx(dict(row.scores), abs=1e-6)
        assert (found["layer"], found["head"], found["kind"]) == (row.layer, row.head, row.kind)


def test_steps_and_examples_are_told(client):
    steps = client.json("/api/r/r1/steps", **HEAD, q=3)
    assert (len(steps["q"]), steps["focus"], steps["rows"]) == (11, 3, list(TEXT))
    assert client.json("/api/example", name="heads", head=1)["heads"] == 2


def test_typing_runs_the_model(client):
    status, body = client.post("/api/type", {"text": "CCAB"})
    found = json.loads(body)
    assert status == 200
    model = sorter().model
    expected = model(torch.tensor([model.text.encode("CCAB")]))[0, -1].softmax(-1)
    assert [one["word"] for one in found["next"]] == ["ABC"[n] for n in expected.argsort(descending=True).tolist()]
    assert [one["probability"] for one in found["next"]] == pytest.approx(
        expected.sort(descending=True).values.tolist(), rel=1e-4
    )
    place = {**HEAD, "level": 0, "row": 0, "column": 0}
    seen = client.codes(f"/api/r/{found['id']}/tile", **place)
    assert torch.equal(seen, coded(weights(recorded("CCAB")), Causal().table(4, 4).reshape(4, 4)).to(torch.int32))


def test_generating_streams_tokens_and_ends_with_their_recording(client):
    status, _, body = client.ask(
        "/api/generate", "POST", b'{"text":"CCAB","tokens":3,"temperature":0}', content_type="application/json"
    )
    *tokens, last = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    assert "".join(one["word"] for one in tokens) == "".join(sorter().model.complete("CCAB", 3, temperature=0))
    assert [one["place"] for one in tokens] == [4, 5, 6]
    assert all(one["likeliest"][0]["probability"] == pytest.approx(one["probability"]) for one in tokens)
    assert all(sum(near["weight"] for near in one["looked"]) <= 1.0001 for one in tokens)
    assert last["recording"]["words"]["words"]["first"] == list("CCAB") + [one["word"] for one in tokens[:-1]]
    assert client.codes(f"/api/r/{last['recording']['id']}/row", **HEAD, q=5).shape == (6,)


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        ("/api/r/r99/words", {}, 404, "no recording 'r99'"),
        ("/api/nothing", {}, 404, "nothing at this address"),
        ("/api/start/", {}, 404, "nothing at this address"),
        ("/api/type", {}, 405, "GET is not understood"),
        ("/api/r/r1/words", {"list": "others"}, 404, "there is words"),
        ("/api/r/r1/words", {"to": "999999"}, 400, "at most 20,000"),
        ("/api/r/r1/cell", {"q": 11, "k": 0}, 400, "q must be at least 0 and below 11, got 11"),
        ("/api/r/r1/cell", {"q": 0, "k": -1}, 400, "k must be a whole number of at least 0, got '-1'"),
        ("/api/r/r1/cell", {"q": "NaN", "k": 0}, 400, "got 'NaN'"),
        ("/api/r/r1/cell", {"q": "9" * 10_000, "k": 0}, 400, "whole number"),
        ("/api/r/r1/cell", {"q": "٣", "k": 0}, 400, "whole number"),
        ("/api/r/r1/cell", {"k": 0}, 400, "got nothing"),
        ("/api/r/r1/tile", {"level": 0, "row": 1, "column": 0}, 400, "level 0 has 1 tiles"),
        ("/api/r/r1/tile", {"level": 0, "row": 0, "column": 0, "how": "sum"}, 400, "mean"),
        ("/api/r/r1/tile", {"level": 5, "row": 0, "column": 0}, 400, "below 1"),
        ("/api/r/r1/row", {"q": 0, "heads": "0,9"}, 400, "head must be at least 0 and below 3"),
        ("/api/r/r1/row", {"q": 0, "heads": "0,,1"}, 400, "commas"),
        ("/api/r/r1/row", {"q": 0, "kind": "cross"}, 400, "no cross attention"),
        ("/api/r/r1/row", {"q": 0, "kind": "both"}, 400, "self or cross"),
        ("/api/r/r1/open", {"layer": 3}, 400, "layer must be at least 0 and below 3"),
        ("/api/r/r1/open", {"b": 1}, 400, "b must be at least 0 and below 1"),
        ("/api/r/r1/heads", {"part": "encoder"}, 400, "encoder"),
        ("/api/r/r1/top", {"q": 0, "n": 0}, 400, "n must be at least 1"),
        ("/api/example", {"name": "none"}, 400, "none"),
        ("/api/example", {"name": "\0"}, 400, "must be a name"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(client, path, query, status, says):
    found, sentence = client.refused(path, **query)
    assert found == status
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b'{"text": "XYZ"}', 400, "no letter of this model"),
        (b'{"text": 7}', 400, "must be of type str"),
        (b'{"text": ""}', 400, "no tokens"),
        (b'{"text": "\\ud800"}', 400, "no letter"),
        (b'{"text": ' + b"[" * 100_000, 400, "JSON object"),
        (b'["text"]', 400, "JSON object"),
        (b'{"text": NaN}', 400, "JSON object"),
        (b"\xff\xfe", 400, "JSON object"),
        (b"", 400, "JSON object"),
        (json.dumps({"text": "A" * 20_001}).encode(), 400, "20,001 characters"),
        (json.dumps({"text": "A" * 300_000}).encode(), 413, "262,144 bytes"),
    ],
)
def test_what_cannot_be_typed_is_one_sentence(client, sent, status, says):
    found, _, body = client.ask("/api/type", "POST", sent, content_type="application/json")
    assert found == status
    assert says in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tokens": 0}, "tokens must be"),
        ({"tokens": 10**9}, "tokens must be"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"tokens": True}, "tokens"),
        ({"tokens": 200}, "choose at most"),
        ({"text": "ABC" * 100}, "shorten it"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(client, more, says):
    _, body = client.post("/api/generate", {"text": "CCAB", "tokens": 3, "temperature": 1, **more})
    assert says in json.loads(body.splitlines()[-1])["error"]


def test_what_is_sent_must_say_that_it_is_json(client):
    assert client.post("/api/type", {"text": "CCAB"}, kind="text/plain")[0] == 415


def test_a_page_without_a_model_says_so(recording):
    with asking(recording) as client:
        assert client.json("/api/start")["model"] is None
        status, body = client.post("/api/type", {"text": "CCAB"})
        assert (status, "no model" in json.loads(body)["error"]) == (400, True)


def test_answers_are_packed_for_those_who_unpack_them(client):
    _, headers, body = client.ask("/api/start", accept_encoding="gzip")
    assert headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(body))["recordings"]
    assert "content-encoding" not in client.ask("/api/start")[1]


def test_half_a_surrogate_pair_and_markup_travel_as_they_are():
    recording = recorded()
    recording.tokens = ["</script>", "\ud800", "\0", "\u202e", "x" * 10_000_000, *"ABCABC"]
    with asking(recording) as client:
        words = client.json("/api/start")["recordings"][0]["words"]["words"]["first"]
        assert words[:4] == ["</script>", "\ud800", "\0", "\u202e"]
        assert words[4] == "x" * 256 + "…"
        assert len(client.ask("/api/start")[2]) < 20_000


def test_numbers_that_are_none_do_not_break_an_answer():
    q = torch.randn(1, 1, 7, 5, generator=torch.Generator().manual_seed(0))
    q[0, 0, 3, 0] = torch.nan
    with asking(rows_and_keys(q, torch.randn(1, 1, 7, 5))) as client:
        assert client.json("/api/r/r1/cell", q=3, k=1) == {
            "weight": None,
            "score": None,
            "rank": None,
            "of": 4,
            "visible": True,
        }
        assert client.codes("/api/r/r1/row", q=3).tolist() == [0] * 7
        assert client.lines("/api/r/r1/open")[-1]["rows"]["entropy"][3] is None


def test_a_client_that_leaves_stops_what_is_computed_for_it(monkeypatch):
    gone_over, strip = [], regard.map.pyramid.strip
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*given):
        gone_over.append(1)
        begun.set()
        go_on.wait(30)
        return strip(*given)

    monkeypatch.setattr(regard.map.pyramid, "strip", slowly)
    monkeypatch.setattr(regard.map.pyramid, "STRIP", 8)
    q = torch.randn(1, 1, 97, 5, generator=torch.Generator().manual_seed(0))
    with asking(rows_and_keys(q, q)) as client:
        leaving = socket.create_connection((client.address.hostname, client.address.port))
        leaving.sendall(b"GET /api/r/r1/open HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(30)
        leaving.close()
        page = client.server.page
        while page.desk.busy:
            time.sleep(0.01)
        go_on.set()
        while any(one.busy() for one in page.session.heads()):
            time.sleep(0.01)
        assert len(gone_over) == 1
        done = client.lines("/api/r/r1/open")  # who comes next goes on from there
        assert done[-1]["levels"] == 1
        assert len(gone_over) == 13


def test_no_more_is_computed_at_a_time_than_there_is_room_for(recording, monkeypatch):
    monkeypatch.setattr(desks, "AT_ONCE", 2)
    inside, go_on = threading.Semaphore(0), threading.Event()
    cell = regard.show.page.numbers.cell

    def slowly(*given):
        inside.release()
        go_on.wait(30)
        return cell(*given)

    monkeypatch.setattr(regard.show.page.numbers, "cell", slowly)
    with asking(recording) as client:
        asked = [threading.Thread(target=client.json, args=("/api/r/r1/cell",), kwargs={"q": 1, "k": 0}) for _ in range(2)]
        for one in asked:
            one.start()
            assert inside.acquire(timeout=30)
        status, sentence = client.refused("/api/r/r1/cell", q=1, k=0)
        assert (status, "try again" in sentence) == (503, True)
        go_on.set()
        for one in asked:
            one.join()
        assert client.json("/api/r/r1/cell", q=1, k=0)


def test_an_answer_that_takes_too_long_is_given_up(recording, monkeypatch):
    monkeypatch.setattr(desks, "ANSWER_SECONDS", 0.05)
    go_on = threading.Event()
    monkeypatch.setattr(regard.show.page.numbers, "cell", lambda *_: go_on.wait(30) and {})
    with asking(recording) as client:
        assert client.refused("/api/r/r1/cell", q=1, k=0)[0] == 504
        go_on.set()


def test_a_fault_of_ours_is_told_in_a_sentence_and_goes_to_the_log(recording, monkeypatch, caplog):
    monkeypatch.setattr(regard.show.page.numbers, "cell", lambda *_: 1 // 0)
    with asking(recording) as client:
        status, sentence = client.refused("/api/r/r1/cell", q=1, k=0)
    assert (status, "ZeroDivision" in sentence) == (500, False)
    assert "ZeroDivisionError" in caplog.text


def test_old_recordings_of_what_was_typed_make_room_and_the_given_one_stays(recording, monkeypatch):
    monkeypatch.setattr(sessions, "TYPED_BYTES", sessions.nbytes(recording))
    with asking(recording, speaker=sorter()) as client:
        first, second = (json.loads(client.post("/api/type", {"text": text})[1])["id"] for text in (TEXT, TEXT))
        assert [one["id"] for one in client.json("/api/start")["recordings"]] == ["r1", second]
        status, sentence = client.refused(f"/api/r/{first}/words")
        assert (status, "make room" in sentence) == (404, True)
        assert client.json("/api/r/r1/words")


def test_few_heads_are_kept_open(recording, monkeypatch):
    monkeypatch.setattr(sessions, "OPENED_BYTES", 3000)
    with asking(recording) as client:
        for head in range(9):
            assert client.lines("/api/r/r1/open", layer=head // 3, head=head % 3)[-1]["levels"] == 1
        assert 1 <= len(client.server.page.session.heads()) < 9


def test_what_a_head_was_divided_by_is_found_once(recording, monkeypatch):
    monkeypatch.setattr("regard.show.page.entry.MAPS", 1)
    with asking(recording) as client:
        client.lines("/api/r/r1/open", **HEAD)
        client.codes("/api/r/r1/row", layer=0, head=0, q=3)  # the map of this layer takes the place of that one
        monkeypatch.setattr(regard.map.AttentionMap, "_known", None)
        assert client.codes("/api/r/r1/column", **HEAD, k=4).shape == (11,)
        assert client.json("/api/r/r1/top", **HEAD, k=4)["found"]


def test_a_head_of_a_recording_that_is_gone_is_not_kept(recording):
    session = sessions.Session(speaker=sorter())
    entry = session.add(recording)
    session.forget(entry.id)
    with pytest.raises(ConfigError, match="make room"):
        session.opened(entry, Place())
    assert not session.heads()


def test_a_head_is_opened_once_whether_its_part_is_named_or_not():
    session = sessions.Session(of_two_parts())
    entry = session.entry("r1")
    assert [one.part for one in entry.attentions] == ["encoder", "decoder"]
    assert session.opened(entry, Place(part="encoder")) is session.opened(entry, Place())
    assert session.opened(entry, Place(part="decoder")) is not session.opened(entry, Place())


def test_a_server_that_has_stopped_leaves_no_thread(recording):
    def working():
        return {one for one in threading.enumerate() if one.name.startswith("regard-page")}

    before = working()
    with asking(recording) as client:
        client.lines("/api/r/r1/open", **HEAD)
        begun = working() - before
    assert begun
    for one in begun:
        one.join(30)
    assert not any(one.is_alive() for one in begun)


def test_it_ends_cleanly_when_it_is_told_to():
    for one in (signal.SIGINT, signal.SIGTERM):
        command = [sys.executable, "-m", "regard", "serve", "--model", "sorter", "--text", TEXT]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                address = process.stdout.readline().strip()
                assert address.startswith("http://127.0.0.1:")
                with socket.create_connection(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]))):
                    process.send_signal(one)
                    _, said = process.communicate(timeout=60)
            finally:
                process.kill()
        assert (process.returncode, said) == (0, "")


def test_an_address_that_is_taken_is_said(recording):
    with asking(recording) as client:
        with pytest.raises(ConfigError, match="cannot be listened at"):
            server(recording, port=client.address.port)
        with pytest.raises(ConfigError, match="cannot be listened at"):
            server(recording, host="256.0.0.1")


@pytest.mark.parametrize("subject", [None, 7, "sorter"])
def test_a_page_needs_a_recording_or_a_model(subject):
    with pytest.raises(ConfigError):
        server(subject)


def test_a_recording_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing was recorded"):
        server(regard.Recording())


def test_two_pages_run_side_by_side(recording):
    with server(recording) as one, server(recorded("CCAB")) as other:
        assert Client(one).json("/api/start")["recordings"][0]["text"] == TEXT
        assert Client(other).json("/api/start")["recordings"][0]["text"] == "CCAB"
