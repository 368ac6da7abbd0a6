import json

import pytest

from regard.cli import main


def run(capsys, *arguments):
    code = main(["heads", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_a_model_is_probed_and_each_clear_head_has_its_sentence(capsys):
    code, out, _ = run(capsys, "--model", "pocket")
    assert code == 0
    words = " ".join(out.split())
    assert "pocket: 36 heads." in words
    assert "1 induction attends to what followed its token before" in words
    assert "raises its logit by" in words
    assert "without it the loss rises by" in words
    assert "8 seeds of 101 tokens: the begin token, 50 random tokens, 2 times." in words
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_the_probe_is_json_with_the_scores_and_their_intervals(capsys, tmp_path):
    haystack = tmp_path / "stories.txt"
    haystack.write_text("Once upon a time there was a cat. The cat had a red ball. " * 60)
    arguments = (
        "--model",
        "pocket",
        "--json",
        "--seeds",
        "3",
        "--ablate",
        "none",
        "--haystack",
        haystack,
        "--sort",
        "induction",
    )
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == 36
    assert list(rows[0]) == ["layer", "head", "kind", "sentence", "scores"]
    assert {"induction", "copying", "ov", "retrieval"} <= set(rows[0]["scores"])
    assert "effect" not in rows[0]["scores"]
    assert rows[0]["scores"]["induction"]["count"] == 3 * 50
    order = [row["scores"]["induction"]["mean"] for row in rows]
    assert order == sorted(order, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "pass a recording, or --model and the name of a model"),
        (("file.regard", "--model", "pocket"), "pass a recording, or --model and the name of a model"),
        (("--model", "pocket", "--head", "1.1"), "--head shows a recording: leave it out with --model"),
        (("--model", "pocket", "--page", "a.html"), "--page shows a recording"),
        (("file.regard", "--seeds", "4"), "--seeds is of a probe: it needs --model"),
        (("file.regard", "--haystack", "a.txt"), "--haystack is of a probe: it needs --model"),
        (("--model", "pocket", "--seeds", "1"), "seeds must be a whole number of at least 2"),
        (("--model", "pocket", "--kind", "wizard"), "--kind must be one of 'induction', 'prefix matching', 'duplicate', "),
        (("absent.regard", "--kind", "wizard"), "'broad', 'unclear'; got 'wizard'"),
        (("--model", "pocket", "--kind", "stripe", "--ablate", "none"), "no head is of kind 'stripe'"),
        (("--model", "pocket", "--haystack", "short", "--ablate", "none"), "the text has"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("regard heads: ")
    assert says in err
    assert err.count("\n") == 1
