import json

import pytest

from regard import ConfigError, DataError
from regard.text import BytePair
from regard.text.byte_pair_files import LONGEST, SPECIALS
from regard.text.safe_cuts import limit_runs

LINES = ["the cat sat on the mat", "the dog sat on the cat"] * 3


def equal_letters(folder, count: int) -> BytePair:
    """Writes a vocabulary of a, aa, aaa and so on, each of which is joined of the one before and a letter."""
    BytePair.train(["x"], 257).save(folder)
    numbers = json.loads((folder / "encoder.json").read_text())
    del numbers["<|endoftext|>"]
    numbers |= {"a" * length: 254 + length for length in range(2, count + 1)}
    lines = ["#version: 0.2", *(f"{'a' * (length - 1)} a" for length in range(2, count + 1))]
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n")
    (folder / "encoder.json").write_text(json.dumps(numbers))
    return BytePair.load(folder)


@pytest.mark.slow
def test_thousands_of_equal_letters_are_read_used_and_written_as_they_are(tmp_path):
    """Looking for the pair of each piece anew would take 10^10 steps."""
    words = equal_letters(tmp_path, 4000)
    assert (words.vocabulary, len(words.pairs)) == (4255, 3999)
    assert words.decode(words.encode("a" * 9001)) == "a" * 9001
    words.save(tmp_path / "again")
    assert (tmp_path / "again" / "vocab.bpe").read_bytes() == (tmp_path / "vocab.bpe").read_bytes()


@pytest.mark.slow
def test_a_piece_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(DataError, match=f"joins a piece of 4,097 bytes; a piece has at most {LONGEST:,}"):
        equal_letters(tmp_path, LONGEST + 1)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("\ud800", "special token with half of a surrogate pair"),
        ("", "special token of 0 characters"),
        ("x" * (LONGEST + 1), "special token of 4,097 characters"),
    ],
)
def test_a_special_token_that_no_text_has_is_refused(tmp_path, word, says):
    words = BytePair.train(LINES, 270)
    words.save(tmp_path)
    numbers = json.loads((tmp_path / "encoder.json").read_text())
    (tmp_path / "encoder.json").write_text(json.dumps({**numbers, word: len(numbers)}))
    with pytest.raises(DataError, match=says):
        BytePair.load(tmp_path)


def test_too_many_special_tokens_are_refused(tmp_path):
    words = BytePair.train(LINES, 270)
    words.save(tmp_path)
    numbers = json.loads((tmp_path / "encoder.json").read_text())
    more = {f"<{n}>": len(numbers) + n for n in range(SPECIALS)}
    (tmp_path / "encoder.json").write_text(json.dumps(numbers | more))
    with pytest.raises(DataError, match=r"has 16,385 words that no pair makes"):
        BytePair.load(tmp_path)


def test_a_pair_of_what_is_no_piece_is_refused(tmp_path):
    words = BytePair.train(LINES, 270)
    words.save(tmp_path)
    numbers = json.loads((tmp_path / "encoder.json").read_text())
    del numbers["<|endoftext|>"]
    (tmp_path / "encoder.json").write_text(json.dumps({**numbers, "qzqz": len(numbers)}))
    with (tmp_path / "vocab.bpe").open("a") as file:
        file.write("qz qz\n")
    with pytest.raises(DataError, match="joins 'qz' to another piece, but no earlier line makes it"):
        BytePair.load(tmp_path)


def test_deep_json_is_refused(tmp_path):
    BytePair.train(LINES, 270).save(tmp_path)
    for content in ("[" * 100_000, '{"a": ' * 100_000):
        (tmp_path / "encoder.json").write_text(content)
        with pytest.raises(DataError, match="not a JSON object of words and their numbers"):
            BytePair.load(tmp_path)


def test_a_vocabulary_that_no_memory_holds_is_refused():
    with pytest.raises(ConfigError, match=r"vocabulary must be 1,073,741,824 at most; got 10{30}\."):
        BytePair.train(LINES, 10**30)


def test_texts_are_learned_from_as_they_are_but_for_long_runs():
    texts = ["the cat sat", "a" * 1024 + " " + "b" * 1024, "", "1" * 1000 + "!" * 1000]
    assert list(limit_runs(texts)) == texts
    run = "ACGT" * 700
    assert list(limit_runs([f"a {run}!b"])) == ["a ", run[:1024], run[1024:2048], run[2048:], "!b"]
    found = list(limit_runs(["x" * (1 << 20)] * 9 + ["the cat"]))
    assert sum(map(len, found)) == (1 << 22) + len("the cat")
    assert max(map(len, found)) == 1024
