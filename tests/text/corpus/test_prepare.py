import signal
import subprocess
import sys
import tracemalloc
from itertools import chain

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError, DataError
from regard.text import BytePair, Letters
from regard.text.corpus import Corpus, prepare, sources
from text.corpus.small_corpus import contents, corpus

WORDS = BytePair.train(["the cat sat on the mat, and the dog saw the cat"] * 5, 290)
TEXTS = ["the cat sat", "naïve café 🦊\n", "a dog, and a dog", "we'll see"] * 5


@given(st.lists(st.text().filter(str.strip), min_size=1), st.integers(1, 40))
def test_a_corpus_is_the_tokens_of_its_documents_each_with_its_end(tmp_path_factory, texts, shard):
    words = WORDS
    made = prepare(texts, words, tmp_path_factory.mktemp("made") / "corpus", shard=shard)
    each = [[*words.encode(text), words.end] for text in texts]
    assert made[:].tolist() == list(chain(*each))
    assert made.starts.tolist() == [sum(map(len, each[:n])) for n in range(len(each))]
    assert (made.tokens, made.documents, made.vocabulary) == (sum(map(len, each)), len(texts), words.vocabulary)
    assert [column.count for column in made.index.shards[:-1]] == [shard] * (len(made.index.shards) - 1)


@pytest.mark.slow
def test_long_documents_come_through_in_parts(tmp_path, monkeypatch):
    for module in (sources, sys.modules["regard.text.corpus.prepare"]):  # several parts of a document, each its own chunk
        monkeypatch.setattr(module, "BLOCK", 50)
    (tmp_path / "long.txt").write_text(" ".join(TEXTS), newline="")
    words = BytePair.gpt2()
    made = prepare(tmp_path / "long.txt", words, tmp_path / "corpus", shard=13)
    assert made[:].tolist() == [*words.encode(" ".join(TEXTS)), words.end]
    assert made.documents == 1


@pytest.mark.slow
def test_what_is_written_is_the_same_for_any_number_of_processes(tmp_path, monkeypatch):
    module = sys.modules["regard.text.corpus.prepare"]
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "CHUNKS_BEFORE_WORKERS", 2)
    for name, workers in (("one", 1), ("three", 3), ("any", None)):
        prepare(TEXTS, BytePair.gpt2(), tmp_path / name, workers=workers, shard=29)
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "any")


@pytest.mark.slow
def test_a_text_that_cannot_be_encoded_is_named_in_whichever_process_it_is_read(tmp_path):
    for workers in (1, 2):
        with pytest.raises(DataError, match="document 2: 'x' is not a letter"):
            prepare(["abc", "a", "axb"], Letters("abc"), tmp_path / "corpus", workers=workers)
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
from regard.text import Letters
from regard.text.corpus import prepare
prepare(["abc"], Letters("abc"), "corpus", workers=2)
"""


@pytest.mark.slow
def test_a_script_that_is_read_again_by_each_process_gets_an_error_that_says_so(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'under `if __name__ == "__main__":`' in ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


@pytest.mark.parametrize(("size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_the_bytes_that_the_vocabulary_needs(tmp_path, size, dtype):
    alphabet = "".join(map(chr, [*range(0xD800), *range(0xE000, 0xE000 + size - 0xD800)]))
    text = Letters(alphabet)
    made = prepare([alphabet[-1] + "a" + alphabet[0]], text, tmp_path / "corpus")
    assert made[:].tolist() == [size - 1, ord("a"), 0]
    assert np.load(tmp_path / "corpus" / "tokens-00000.npy").dtype == dtype


@pytest.mark.slow
def test_the_same_documents_from_a_file_from_rows_and_from_a_dataset_are_the_same_corpus(tmp_path):
    rows = [{"text": text} for text in TEXTS]
    datasets.Dataset.from_list(rows).to_json(tmp_path / "some.jsonl")
    made = [tmp_path / "lines", tmp_path / "rows", tmp_path / "table"]
    for folder, source in zip(made, (tmp_path / "some.jsonl", rows, datasets.Dataset.from_list(rows)), strict=True):
        prepare(source, BytePair.gpt2(), folder)
    assert contents(made[0]) == contents(made[1]) == contents(made[2])


@pytest.mark.slow
def test_progress_goes_up_to_the_bytes_of_the_files(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("word " * 300_000)
    told = []
    prepare(tmp_path, BytePair.gpt2(), tmp_path / "corpus", progress=lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert len(done) > 2
    assert done[-1] == totals[0] == 4_500_000
    prepare(TEXTS, BytePair.gpt2(), tmp_path / "corpus", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (sum(len(text.encode()) for text in TEXTS), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line", "mebibytes"),
    [
        pytest.param(Letters("abcdefg \n"), "abc def\n", 3, id="letters"),
        pytest.param(Letters("abcdefg \n"), "abcdefga", 3, id="letters without white space"),
        pytest.param(BytePair.gpt2(), "abcdefga", 6, id="byte pairs without white space", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_corpus(tmp_path, text, line, mebibytes):
    def peak(size):
        path = tmp_path / f"{size}.txt"
        path.write_text(line * (size << 17))
        tracemalloc.start()
        prepare(path, text, tmp_path / "corpus", workers=1, shard=2**18)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    assert peak(2 * mebibytes) < 1.1 * peak(mebibytes)


@pytest.mark.parametrize("with_corpus", [False, True])
def test_a_folder_that_holds_anything_else_is_refused_and_left_as_it_is(tmp_path, with_corpus):
    if with_corpus:
        corpus(tmp_path, ["abc"])
    (tmp_path / "corpus").mkdir(exist_ok=True)
    (tmp_path / "corpus" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"holds notes\.txt, which is not part of a corpus"):
        corpus(tmp_path, ["abc"])
    assert contents(tmp_path) == before
    with pytest.raises(DataError, match=r"holds notes\.txt, which is not part of a corpus"):
        prepare(["abc"], Letters("abc"), tmp_path / "corpus" / "notes.txt")


def test_a_failure_leaves_the_former_corpus_and_nothing_beside_it(tmp_path):
    corpus(tmp_path, ["abc"])
    before = contents(tmp_path)

    def texts():
        yield "abc"
        raise RuntimeError("the network, say")

    with pytest.raises(RuntimeError):
        corpus(tmp_path, texts())
    with pytest.raises(DataError, match="no text: every document of it is empty"):
        corpus(tmp_path, ["", " \n"])
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


KILLED = """
import itertools, sys
from regard.text import Letters
from regard.text.corpus import prepare
prepare((print(n, flush=True) or "abc" * 1000 for n in itertools.count()), Letters("abc"), sys.argv[1], workers=1, shard=2**18)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_former_corpus(tmp_path):
    corpus(tmp_path, ["abc"])
    before = contents(tmp_path / "corpus")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "corpus")], stdout=subprocess.PIPE) as running:
        for _ in range(5000):
            running.stdout.readline()
        running.send_signal(signal.SIGKILL)
    assert contents(tmp_path / "corpus") == before
    assert Corpus.load(tmp_path / "corpus").tokens == 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written to"):
        prepare(["abc"], Letters("abc"), tmp_path / "file" / "corpus")


def test_settings_that_cannot_be_are_refused(tmp_path):
    for wrong in ({"shard": 0}, {"workers": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            prepare(["abc"], Letters("abc"), tmp_path / "corpus", **wrong)
