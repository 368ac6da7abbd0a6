"""Files of texts and vocabularies, altered in any way: they are read as what was written, or refused in our own class."""

import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regard import RegardError
from regard.text import BytePair, Letters
from regard.text import pairs as sentence_pairs
from regard.text.corpus import Corpus, Reader, prepare
from regard.text.corpus.sources import iterate_parts
from regard.text.pairs import PairReader, Pairs
from regard.text.pairs.sources import read_pairs
from text.pairs.small_pairs import make_pairs, write_pairs

TEXTS = ["the cat sat on the mat, 5 times", "naïve café 🦊\n", "a dog, and a dog", "we'll see"] * 5
TIMES = 60  # alterations of each file
WORDS = [
    b"-5",
    b"true",
    b"null",
    b"1e999",
    b"[]",
    b"{}",
    b'"x"',
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"9" * 5000,
    b"\\ud800",
    b"\x00",
]


def alter_file(held: bytes, dice: random.Random) -> bytes:
    """A file with bits flipped, an end cut off, a part said twice, or another word at the place of a number or anywhere."""
    start, stop = sorted(dice.randrange(len(held) + 1) for _ in range(2))
    word = dice.choice(WORDS)
    numbers = [at for at in range(len(held)) if held[at : at + 1].isdigit()]
    at = dice.choice(numbers) if numbers else start
    flipped = bytearray(held)
    if held:
        flipped[min(start, len(held) - 1)] ^= 1 << dice.randrange(8)
    return dice.choice(
        [bytes(flipped), held[:start], held[start:], held[:stop] + held[start:], held[:at] + word + held[at + 1 :], word]
    )


def tries(folder: Path, read: Callable[[], object], seal: Callable[[Path], None] | None = None) -> Iterator[tuple[str, object]]:
    """What is read after each alteration of each file of a folder; an error that is none of ours ends the test."""
    dice = random.Random(0)
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        held = path.read_bytes()
        for _ in range(TIMES):
            path.write_bytes(alter_file(held, dice))
            if seal is not None:
                seal(path)
            try:
                yield path.name, read()
            except RegardError as error:
                yield path.name, refuse(error)
        path.write_bytes(held)


def refuse(error: RegardError) -> None:
    """Asserts that an error is short enough to read."""
    assert len(str(error)) <= 500


def tell(what: str, found: list[object]) -> None:
    print(f"{what}: {len(found)} altered files, {sum(one is None for one in found)} refused")
    assert any(one is None for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("text", [Letters.from_texts(TEXTS), BytePair.train(TEXTS, 280)], ids=["letters", "pairs"])
def test_a_corpus_that_was_altered_is_refused_or_the_same(tmp_path, text):
    made = prepare(TEXTS, text, tmp_path / "corpus", shard=100, workers=1)
    expected = made[:].tolist(), made.starts.tolist(), made.text.decode(made[:].tolist())

    def read():
        corpus = Corpus.load(tmp_path / "corpus")
        corpus.check()
        return corpus[:].tolist(), corpus.starts.tolist(), corpus.text.decode(corpus[:].tolist())

    found = [one for _, one in tries(tmp_path / "corpus", read)]
    assert all(one in (None, expected) for one in found)
    tell("a corpus", found)


@pytest.mark.slow
def test_an_index_that_was_made_up_is_refused_or_read_within_its_files(tmp_path):
    made = prepare(TEXTS, Letters.from_texts(TEXTS), tmp_path / "corpus", shard=100, workers=1)
    path, dice, found = tmp_path / "corpus" / "corpus.json", random.Random(0), []
    says = json.loads(path.read_text())
    values = [-5, True, None, 0, 1, 10**30, 2**40, "x", "../tokens-00000.npy", "<u4", "O", [], {}, 1.5]
    for _ in range(600):
        told = json.loads(json.dumps(says))
        inside = dice.choice([told, told["shards"][0], told["shards"][-1], told["starts"], told["text"]])
        inside[dice.choice(list(inside))] = dice.choice(values)
        path.write_text(json.dumps(told))
        with pytest.MonkeyPatch.context() as patch:  # a checksum that is right, whatever is said
            patch.setattr(
                "regard.text.corpus.corpus.CorpusIndex.checksum", property(lambda index, told=told: told.get("checksum"))
            )
            try:
                corpus = Corpus.load(tmp_path / "corpus")
                corpus.check()
                found.append(Reader(corpus, batch=2, context=7).read(3).tokens.max() < made.vocabulary)
            except RegardError as error:
                found.append(refuse(error))
    assert all(one is None or one for one in found)
    tell("made-up indices", found)


@pytest.mark.slow
def test_sentence_pairs_that_were_altered_are_refused_or_the_same(tmp_path):
    made = sentence_pairs.prepare(write_pairs(tmp_path, "some", make_pairs(30)), tmp_path / "pairs", vocabulary=280, valid=0.2)
    expected = made.train.decode_sentences("source"), made.train.decode_sentences("target")

    def read():
        pairs = Pairs.load(tmp_path / "pairs")
        PairReader(pairs.train, 50).read(3)
        return pairs.train.decode_sentences("source"), pairs.train.decode_sentences("target")

    found = [one for _, one in tries(tmp_path / "pairs", read)]
    assert all(one in (None, expected) for one in found)
    tell("sentence pairs", found)


@pytest.mark.slow
def test_a_vocabulary_that_was_altered_is_refused_or_gives_texts_back(tmp_path):
    BytePair.train(TEXTS, 300).save(tmp_path)
    text = "".join(TEXTS)

    def read():
        words = BytePair.load(tmp_path)
        words.save(tmp_path.with_name("again"))
        return words.decode(words.encode(text)) == text

    found = [one for _, one in tries(tmp_path, read)]
    assert all(one is None or one for one in found)
    tell("vocabularies", found)


@pytest.mark.slow
def test_an_alphabet_that_was_altered_is_refused_or_read(tmp_path):
    Letters.from_texts(TEXTS).save(tmp_path)
    found = [one for _, one in tries(tmp_path, lambda: Letters.load(tmp_path).decode([0, 1]))]
    tell("alphabets", found)


@pytest.mark.slow
def test_texts_that_were_altered_are_refused_or_read(tmp_path):
    (tmp_path / "some.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"text": text, "id": 5}) for text in TEXTS))
    words = BytePair.gpt2()

    def read():
        texts = [part.text for part in iterate_parts(tmp_path)]
        return all(words.decode(words.encode(text)) == text for text in texts)

    found = [one for _, one in tries(tmp_path, read)]
    assert all(one is None or one for one in found)
    tell("texts", found)


@pytest.mark.slow
def test_sources_of_pairs_that_were_altered_are_refused_or_read(tmp_path):
    table = "\n".join(f"{one.lower()}\t{one.upper()}" for one in TEXTS[:3])
    (tmp_path / "some.tsv").write_text(table)
    with zipfile.ZipFile(tmp_path / "some.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("some.txt", table * 9)

    def read():
        return [list(read_pairs(tmp_path / name, ("en", "fr"))) for name in ("some.tsv", "some.zip")]

    tell("sources of pairs", [one for _, one in tries(tmp_path, read)])
