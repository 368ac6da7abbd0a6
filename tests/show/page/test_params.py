import json

import pytest


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        ("/api/r/r99/words", {}, 404, "no recording 'r99'"),
        ("/api/nothing", {}, 404, "nothing at this address"),
        ("/api/start/", {}, 404, "nothing at this address"),
        ("/api/type", {}, 405, "GET is not allowed"),
        ("/api/r/r1/words", {"list": "others"}, 404, "the lists are words"),
        ("/api/r/r1/words", {"to": "999999"}, 400, "at most 5,000"),
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
        ("/api/example", {"name": "simple", "head": 1}, 400, "head must be"),
        ("/api/example", {"name": "../../etc/passwd"}, 400, "passwd"),
        ("/api/r/r1/steps", {"q": 11}, 400, "at most 10"),
        ("/api/r/r1/thumbs", {"layer": 3}, 400, "below 3"),
        ("/api/r/r1/words", {"b": 1}, 400, "b must be"),
        ("/api/r/r1/cell", [("q", 1), ("q", 2), ("k", 0)], 400, "'q' must be given once"),
        ("/api/r/r1/open", [("head", 1), ("head", 1)], 400, "'head' must be given once"),
        ("/api/r/r1/heads", [("x", 1)] * 3, 400, "got it 3 times"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(client, path, query, status, says):
    found, sentence = client.expect_refusal(path, query)
    assert found == status
    assert says in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (b'{"text": "XYZ"}', 400, "not a letter of this model"),
        (b'{"text": 7}', 400, "must be of type str"),
        (b'{"text": ""}', 400, "no tokens"),
        (b'{"text": "\\ud800"}', 400, "not a letter"),
        (b'{"text": ' + b"[" * 100_000, 400, "JSON object"),
        (b'["text"]', 400, "JSON object"),
        (b'{"text": NaN}', 400, "JSON object"),
        (b'{"text": "CCAB"} {}', 400, "JSON object"),
        (b'{"text": null}', 400, "must be of type str"),
        (b'{"text": 1e999}', 400, "must be of type str"),
        (b'{"text": ' + b"9" * 5000 + b"}", 400, "JSON object"),
        (b'{"text": "A\0B"}', 400, "JSON object"),
        (json.dumps({"text": "\u202e"}).encode(), 400, "not a letter"),
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
        ({"temperature": 1e-320}, "at least 0.01"),
        ({"temperature": 10**400}, "at most 100"),
        ({"temperature": float("inf")}, "JSON object"),
        ({"temperature": "1"}, "temperature"),
        ({"text": ""}, "no tokens"),
        ({"seed": 1.5}, "seed"),
        ({"tokens": True}, "tokens"),
        ({"tokens": 200}, "choose at most"),
        ({"text": "ABC" * 100}, "shorten it"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(client, more, says):
    status, body = client.post("/api/generate", {"text": "CCAB", "tokens": 3, "temperature": 1, **more})
    assert status == 400
    assert says in json.loads(body)["error"]


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1])
def test_a_whole_number_of_64_bits_is_a_seed(client, seed):
    sent = {"text": "CCAB", "tokens": 2, "temperature": 1, "seed": seed}
    first, second = (client.post("/api/generate", sent)[1].splitlines()[0] for _ in range(2))
    assert json.loads(first)["word"]
    assert first == second


@pytest.mark.parametrize(
    "path",
    [
        *("/api/r/%ff/words", "/api/r/%00/words", "/api/r/../r1/words", "/api/r//words", "//api/start", "/API/start", "*"),
        *("/static/%ff", "/static/..%2fserver.py", "/static/..%5cserver.py", "/static/main.js%00.png", "/static/views/"),
    ],
)
def test_paths_of_nothing_are_404(client, path):
    assert client.expect_refusal(path)[0] == 404


@pytest.mark.parametrize(
    "query", ["q=%ff&k=0", "q=1;k=0", "q[]=1&k=0", "q=%201&k=0", "q=1%0a&k=0", "q=%2b1&k=0", "q=1&k=0&part=%ff"]
)
def test_queries_of_other_letters_are_refused(client, query):
    assert client.expect_refusal(f"/api/r/r1/cell?{query}")[0] == 400


def test_what_is_sent_must_say_that_it_is_json(client):
    assert client.post("/api/type", {"text": "CCAB"}, kind="text/plain")[0] == 415
