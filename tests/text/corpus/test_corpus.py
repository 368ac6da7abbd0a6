import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError, DataError
from regard.text import BytePair
from regard.text.corpus import Corpus, prepare
from text.corpus.small_corpus import LETTERS, contents, corpus

TEXTS = ["abc", "defgabcdef", "ga", "bcd efg abc"]


@given(st.integers(1, 30), st.data())
def test_any_part_is_that_of_the_row_of_all_tokens(tmp_path_factory, shard, data):
    made = corpus(tmp_path_factory.mktemp("made"), TEXTS, shard)
    whole = LETTERS.encode("".join(TEXTS))
    start, stop = data.draw(st.integers(-30, 30)), data.draw(st.integers(-30, 30))
    assert made[start:stop].tolist() == whole[start:stop]
    assert len(made) == made.tokens == len(whole)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert made.find_documents(np.array([cut]))[0] == [n for n, text in enumerate(TEXTS) for _ in text][cut]


def test_a_corpus_comes_back_from_its_folder_with_its_encoding(tmp_path):
    words = BytePair.train(["the cat sat on the mat"] * 5, 270)
    made = prepare(["the cat", "a mat"], words, tmp_path / "corpus")
    again = Corpus.load(tmp_path / "corpus")
    assert again[:].tolist() == made[:].tolist()
    assert again.text.decode(again[:].tolist()) == "the cat<|endoftext|>a mat<|endoftext|>"
    assert again.checksum == made.checksum
    assert "tokens of 2 documents" in repr(again)


@given(st.lists(st.integers(2, 30), min_size=2, max_size=9), st.floats(0.01, 0.99))
def test_a_split_is_at_the_border_of_documents_nearest_to_the_share(tmp_path_factory, sizes, share):
    made = corpus(tmp_path_factory.mktemp("made"), ["a" * size for size in sizes])
    kept, held_out = made.split(share)
    borders = np.cumsum(sizes)[:-1]
    wanted = made.tokens - round(share * made.tokens)
    assert abs(kept.tokens - wanted) == min(abs(borders - wanted))
    assert kept.tokens in borders
    assert (kept.tokens + held_out.tokens, kept.documents + held_out.documents) == (made.tokens, len(sizes))
    assert [*kept[:], *held_out[:]] == made[:].tolist()
    assert len({made.checksum, kept.checksum, held_out.checksum}) == 3


@given(st.floats(0.01, 0.99))
def test_a_part_is_split_at_its_own_borders(tmp_path_factory, share):
    made = corpus(tmp_path_factory.mktemp("made"), ["a" * 9, "b" * 9, "c" * 5, "d" * 7])
    kept, held_out = made.split(0.4)[1].split(share)
    assert (kept[:].tolist(), held_out[:].tolist()) == ([2] * 5, [3] * 7)


@pytest.mark.parametrize("share", [0, 1, -0.1, 0.04, 0.96])
def test_a_share_that_cannot_be_held_out_is_refused(tmp_path, share):
    with pytest.raises(ConfigError, match=r"held_out|held out"):
        corpus(tmp_path, ["abcdefgabc"]).split(share)


def test_every_byte_that_is_altered_is_noticed(tmp_path):
    corpus(tmp_path, TEXTS)
    for name, data in contents(tmp_path / "corpus").items():
        path = tmp_path / "corpus" / name
        for at in {0, 7, 60, len(data) // 2, len(data) - 3} & set(range(len(data))):
            if name == "corpus.json" and data[at : at + 1].isspace():
                continue  # between what it says
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(DataError, match=name):
                Corpus.load(tmp_path / "corpus").check()
        path.write_bytes(data)
    Corpus.load(tmp_path / "corpus").check()


def test_what_is_cut_short_or_missing_is_noticed_when_it_is_loaded(tmp_path):
    corpus(tmp_path, TEXTS)
    for name, data in contents(tmp_path / "corpus").items():
        path = tmp_path / "corpus" / name
        for short in (data[:-2], data[: len(data) // 2], b"", data + b"\0\0"):
            path.write_bytes(short)
            with pytest.raises(DataError, match=name):
                Corpus.load(tmp_path / "corpus")
        path.unlink()
        with pytest.raises(DataError, match=name):
            Corpus.load(tmp_path / "corpus")
        path.write_bytes(data)


def test_an_altered_shard_is_noticed_when_it_is_first_touched_and_no_other_is_read(tmp_path):
    corpus(tmp_path, TEXTS)
    path = tmp_path / "corpus" / "tokens-00002.npy"
    data = path.read_bytes()
    path.write_bytes(data[:-2] + b"\1\0")
    made = Corpus.load(tmp_path / "corpus")
    assert made[:14].tolist() == LETTERS.encode("".join(TEXTS))[:14]
    with pytest.raises(DataError, match=r"tokens-00002\.npy is damaged or altered: its checksum is \w{8}, but was \w{8}"):
        made[13:15]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "another"}, "not an index of a corpus that regard prepared"),
        ({"version": 2}, "has version 2, and this regard reads up to 1: update regard"),
        ({"version": "1"}, "update regard"),
        ({"tokens": 5}, "damaged or altered"),
        ({"shards": 5}, "damaged or altered"),
        ({"shards": [{}]}, "damaged or altered"),
        ({"starts": None}, "damaged or altered"),
        ({"text": {}}, "damaged or altered"),
    ],
)
def test_a_foreign_a_newer_and_a_damaged_index_are_named(tmp_path, change, says):
    corpus(tmp_path, TEXTS)
    path = tmp_path / "corpus" / "corpus.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=says):
        Corpus.load(tmp_path / "corpus")


def test_a_folder_that_is_no_corpus_is_refused_with_what_makes_one(tmp_path):
    with pytest.raises(DataError, match=r"is not a corpus: it has no corpus\.json"):
        Corpus.load(tmp_path)
