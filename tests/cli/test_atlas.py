import json

import pytest

from head_atlas.small_atlas import make_model, make_texts
from regard.cli import main

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'regard[atlas]'")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(make_texts()))
    make_model("\n").save(tmp_path / "model")
    return tmp_path


def run(capsys, place, *arguments, named=True):
    model = ("--model", place / "model", "--on", place / "texts.txt", "--tokens", 48) if named else ()
    code = main(["atlas", *map(str, (*arguments, "--out", place / "atlas", *model))])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_it_prints_what_the_heads_do_and_where_the_pages_are(capsys, place):
    code, out, _ = run(capsys, place)
    words = " ".join(out.split())
    assert code == 0
    assert words.startswith("4 heads. 19 documents of at most 48 tokens, of each 64 queries or fewer.")
    assert "site/index.html" in words.replace(" ", "")
    assert (place / "atlas" / "site" / "index.html").is_file()
    assert max(map(len, (line for line in out.splitlines() if str(place) not in line))) <= 80


@pytest.mark.slow
def test_as_json_it_is_a_list_of_heads_with_their_scores(capsys, place):
    code, out, _ = run(capsys, place, "--json")
    heads = json.loads(out)
    assert code == 0
    assert [(head["layer"], head["head"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(head["kind"] and head["sentence"] for head in heads)
    assert {"mean", "low", "high", "count", "chance"} == heads[0]["scores"]["induction"].keys()


@pytest.mark.slow
def test_shards_are_computed_apart_and_merged(capsys, place):
    code, out, _ = run(capsys, place, "--shard", "0/2")
    assert code == 0
    assert "The shards 0/2 are computed" in out
    code, _, said = run(capsys, place, "merge", named=False)
    assert code == 2
    assert "shard 1 of 3 is missing" in " ".join(said.split())
    assert run(capsys, place, "--shard", "1/2")[1].startswith("4 heads")
    assert run(capsys, place, "merge", named=False)[1].startswith("4 heads")


@pytest.mark.parametrize(
    ("arguments", "named", "sentence"),
    [
        ([], False, "pass --model, the name of a model, and --on, the texts"),
        (["merge"], True, "takes --out, the folder with the shards, and nothing else"),
        (["--shard", "2/2"], True, "--shard is I/N with I from 0 to N - 1"),
        (["--shard", "x"], True, "--shard is I/N with I from 0 to N - 1"),
        (["--on", "missing.txt"], True, "there is no missing.txt"),
        (["--documents", "0"], True, "documents"),
        (["--tokens", "8"], True, "tokens"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_sentence(capsys, place, arguments, named, sentence):
    model = ["--model", str(place / "model"), "--on", str(place / "texts.txt")] if named else []
    code = main(["atlas", "--out", str(place / "atlas"), *model, *arguments])
    said = capsys.readouterr().err
    assert code == 2
    assert sentence in " ".join(said.split())
    assert said.count("\n") == 1


def test_a_file_in_place_of_the_folder_is_refused_in_a_sentence(capsys, place):
    (place / "atlas").write_text("")
    code, out, err = run(capsys, place)
    assert (code, out) == (2, "")
    assert err == f"regard atlas: {place / 'atlas'} cannot be the folder of an atlas: File exists.\n"
