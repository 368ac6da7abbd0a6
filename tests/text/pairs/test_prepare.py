import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import ConfigError, DataError
from regard.text import BytePair
from regard.text.pairs import Pairs, prepare
from regard.text.pairs.prepare import choose_part, normalize_sentence, split_pairs
from regard.text.pairs.sources import SentencePair
from text.corpus.small_corpus import contents
from text.pairs.small_pairs import SAMPLE, make_pairs, write_pairs

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff")
CLEAN = st.text(LETTERS, min_size=1).map(lambda text: " ".join(text.split())).filter(bool)


@pytest.fixture
def files(tmp_path):
    for name, some in (("train", make_pairs(60)), ("val", SAMPLE[:2]), ("test", SAMPLE[2:])):
        write_pairs(tmp_path / "files", name, some)
    return tmp_path / "files"


def sides(part):
    return list(zip(part.decode_sentences("source"), part.decode_sentences("target"), strict=True))


@pytest.mark.slow
@settings(max_examples=8)
@given(st.lists(st.tuples(CLEAN, CLEAN), min_size=1, max_size=20))
def test_every_sentence_comes_back_as_it_was(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "some.tsv").write_bytes("".join(f"{a}\t{b}\n" for a, b in pairs).encode())
    made = prepare(folder / "some.tsv", folder / "made", vocabulary=BytePair.gpt2(), valid=0.0, test=0.0)
    assert sides(made.train) == pairs
    assert (len(made.valid), len(made.test)) == (0, 0)


def test_the_parts_of_a_folder_stay_what_they_are(files, tmp_path):
    made = prepare(files, tmp_path / "made", vocabulary=300)
    assert [sides(part) for part in (made.train, made.valid, made.test)] == [make_pairs(60), SAMPLE[:2], SAMPLE[2:]]
    assert (made.text.vocabulary, set(made.text.special)) == (300, {"<|endoftext|>"})


def test_the_vocabulary_is_learned_from_both_sides_of_the_training_part_alone(files, tmp_path):
    made = prepare(files, tmp_path / "made", vocabulary=400)
    expected = BytePair.train(chain.from_iterable(make_pairs(60)), 400)
    assert made.text.pairs == expected.pairs


def test_what_was_prepared_is_loaded_and_the_same_files_make_the_same(files, tmp_path):
    made, again = (prepare(files, tmp_path / name, vocabulary=300) for name in ("made", "again"))
    assert contents(tmp_path / "made") == contents(tmp_path / "again")
    loaded = Pairs.load(tmp_path / "made")
    assert sides(loaded.train) == sides(made.train)
    assert loaded.checksum == again.checksum != prepare(files, tmp_path / "other", vocabulary=290).checksum


def test_one_byte_that_changed_in_any_file_is_noticed(files, tmp_path):
    prepare(files, tmp_path / "made", vocabulary=300)
    for name, data in contents(tmp_path / "made").items():
        (tmp_path / "made" / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(DataError, match=rf"{name}"):
            Pairs.load(tmp_path / "made")
        (tmp_path / "made" / name).unlink()
        with pytest.raises(DataError, match=rf"{name}"):
            Pairs.load(tmp_path / "made")
        (tmp_path / "made" / name).write_bytes(data)
    Pairs.load(tmp_path / "made")


def test_an_index_of_a_newer_regard_says_so(files, tmp_path):
    prepare(files, tmp_path / "made", vocabulary=300)
    path = tmp_path / "made" / "pairs.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(DataError, match="has version 99, and this regard reads up to 1: update regard"):
        Pairs.load(tmp_path / "made")


def test_a_failure_leaves_what_was_there_and_other_folders_are_not_touched(files, tmp_path):
    prepare(files, tmp_path / "made", vocabulary=300)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"holds test\.en, which is not part of a corpus"):
        prepare(files, files, vocabulary=300)
    (tmp_path / "files" / "train.fr").write_text("x\n")
    with pytest.raises(DataError, match="60 lines"):
        prepare(files, tmp_path / "made", vocabulary=300)
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"files/train.fr"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"languages": ("en", "en")}, "languages must be two different file endings"),
        ({"valid": 0.5, "test": 0.5}, "together below 1"),
        ({"test": -0.1}, "shares"),
        ({"vocabulary": 200}, "vocabulary must be at least 257"),
    ],
)
def test_settings_that_cannot_be_are_refused(files, tmp_path, wrong, says):
    with pytest.raises(ConfigError, match=says):
        prepare(files, tmp_path / "made", **wrong)
    assert not (tmp_path / "made").exists()


def test_without_a_pair_to_train_on_nothing_is_prepared(tmp_path):
    (tmp_path / "none.tsv").write_text("\n")
    with pytest.raises(DataError, match=r"no sentence pair to train on in .*none\.tsv"):
        prepare(tmp_path / "none.tsv", tmp_path / "made")


def parts(pairs, valid=0.1, test=0.2):
    return [part for part, _ in split_pairs(pairs, valid, test)]


@given(st.lists(st.tuples(st.sampled_from(["Go.", "go", "GO !", "Stop.", "stop", "ﬁne", "Fine"]), st.text()), max_size=30))
def test_no_source_sentence_is_in_two_parts_however_it_is_written(sides):
    pairs = [SentencePair(*one) for one in sides]
    found = {(normalize_sentence(one.source), part) for part, one in split_pairs(pairs, 0.3, 0.3)}
    assert len(found) == len({sentence for sentence, _ in found})


def test_a_sentence_that_a_file_gives_to_a_part_goes_there_from_other_files_too():
    pairs = [
        SentencePair("A dog runs.", "x", "test"),
        SentencePair("Two men.", "y", "train"),
        SentencePair("Two cats.", "z", "valid"),
    ]
    others = [SentencePair("a dog runs", "1"), SentencePair("two men!", "2"), SentencePair("TWO CATS", "3")]
    for share in (0.0, 0.9):
        assert parts([*pairs, *others], valid=0.0, test=share) == ["test", "train", "valid"] * 2


def test_the_part_of_a_sentence_depends_on_nothing_but_itself_and_is_that_of_every_version():
    known = {"go": "test", "stop": "train", "run": "train", "on": "valid", "good": "test", "a": "valid"}
    assert {sentence: choose_part(sentence, 0.25, 0.25) for sentence in known} == known
