import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from execution_counts import count_lines
from regard import ConfigError, DataError
from regard.text import Letters
from regard.text.corpus import Corpus, Reader, prepare
from regard.text.corpus.reader import NO_TARGET, EpochReader, shuffle_places

ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))  # letters enough that each token of a corpus is another


def prepare_numbered_corpus(folder, sizes, shard=11):
    """A corpus in which token n is n, of documents of these sizes."""
    borders = np.cumsum([0, *sizes]).tolist()
    texts = [ALPHABET[start:stop] for start, stop in pairwise(borders)]
    return prepare(texts, Letters(ALPHABET), folder / "corpus", shard=shard)


@pytest.fixture(scope="module")
def number_corpus(tmp_path_factory):
    return prepare_numbered_corpus(tmp_path_factory.mktemp("made"), [31, 1, 97, 2, 60])


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(0, 3),
    st.integers(0, 2**40),
)
def test_every_token_but_the_first_is_a_target_once_an_epoch(tmp_path_factory, sizes, context, batch, epoch, seed):
    made = prepare_numbered_corpus(tmp_path_factory.mktemp("made"), sizes)
    reader = Reader(made, batch=batch, context=context, seed=seed)
    first, last = epoch * reader.windows, (epoch + 1) * reader.windows  # rows of the stream
    batches = range(first // batch, -(-last // batch))
    rows = torch.cat([reader.read(n).targets for n in batches])[first - batches[0] * batch :][: reader.windows]
    assert Counter(rows[rows != -100].tolist()) == Counter(range(1, made.tokens))


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 9))
def test_targets_are_the_tokens_that_come_next_and_documents_are_those_of_the_tokens(number_corpus, n, context, batch):
    read = Reader(number_corpus, batch=batch, context=context, seed=3).read(n)
    document = [number for number, size in enumerate([31, 1, 97, 2, 60]) for _ in range(size)]
    assert read.tokens.shape == read.targets.shape == read.documents.shape == (batch, context)
    assert {read.tokens.dtype, read.targets.dtype, read.documents.dtype} == {torch.int64}
    for tokens, targets, documents in zip(read.tokens.tolist(), read.targets.tolist(), read.documents.tolist(), strict=True):
        there = [n for n, target in enumerate(targets) if target != -100]
        assert there == list(range(len(there)))
        for at, (token, target, of) in enumerate(zip(tokens, targets, documents, strict=True)):
            if at < len(there):
                assert (target, of) == (token + 1, document[token])
                assert token == tokens[0] + at
            else:  # the corpus has ended: its last token, and then nothing
                assert (token, of) == ((number_corpus.tokens - 1, document[-1]) if at == len(there) else (0, -1))


@given(st.permutations(range(12)))
def test_a_batch_is_the_same_whatever_was_read_before(number_corpus, order):
    reader, again = (Reader(number_corpus, batch=6, context=13, seed=5) for _ in range(2))
    straight = [reader.read(n) for n in range(12)]
    for n in order:
        assert torch.equal(again.read(n).tokens, straight[n].tokens)
        assert torch.equal(again.read(n).targets, straight[n].targets)


OTHER = """
import json, sys
from regard.text.corpus import Corpus, Reader
reader = Reader(Corpus.load(sys.argv[1]), batch=6, context=13, seed=5)
print(json.dumps([reader.read(n).tokens.tolist() for n in (1000, 3)]))
"""


@pytest.mark.slow
def test_a_batch_is_the_same_in_another_process(number_corpus):
    ran = subprocess.run([sys.executable, "-c", OTHER, str(number_corpus.folder)], capture_output=True, text=True, check=True)
    reader = Reader(number_corpus, batch=6, context=13, seed=5)
    assert json.loads(ran.stdout) == [reader.read(n).tokens.tolist() for n in (1000, 3)]


@given(st.integers(0, 50), st.sampled_from([1, 2, 3, 6]), st.integers(1, 70))
def test_the_rows_of_all_ranks_are_those_of_one(number_corpus, n, world, context):
    whole = Reader(number_corpus, batch=6, context=context, seed=1).read(n)
    parts = [Reader(number_corpus, batch=6, context=context, seed=1, rank=rank, world=world).read(n) for rank in range(world)]
    for name in ("tokens", "targets", "documents"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch", [3, 12, 300])
def test_the_batches_of_one_epoch_have_each_token_as_a_target_once(number_corpus, batch, world):
    readers = [EpochReader(number_corpus, batch, 7, seed=2, rank=rank, world=world) for rank in range(world)]
    targets = torch.cat([one.read(n).targets.flatten() for n in range(readers[0].batches) for one in readers])
    found = targets[targets != NO_TARGET]
    assert sorted(found.tolist()) == sorted(number_corpus[1 : number_corpus.tokens].tolist())


def test_epochs_and_seeds_differ_in_their_order(number_corpus):
    def epoch(number, seed):
        reader = Reader(number_corpus, batch=1, context=7, seed=seed)
        return tuple(int(reader.read(number * reader.windows + n).tokens[0, 0]) for n in range(reader.windows))

    orders = [epoch(number, seed) for seed in (0, 1) for number in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_a_part_that_is_held_out_is_never_read(number_corpus):
    kept, held_out = number_corpus.split(0.4)
    readers = [Reader(part, batch=5, context=9) for part in (kept, held_out)]
    seen = [set(torch.cat([reader.read(n).targets for n in range(40)]).flatten().tolist()) - {-100} for reader in readers]
    assert seen == [set(range(1, kept.tokens)), set(range(kept.tokens + 1, number_corpus.tokens))]
    assert int(Reader(held_out, batch=1, context=held_out.tokens).read(0).documents[0, 0]) == kept.documents


@pytest.mark.slow
def test_reading_takes_no_loop_over_tokens(tmp_path):
    prepare(["ab" * 50_000] * 2, Letters("ab"), tmp_path / "corpus", shard=2**15)
    opened = (
        "from regard.text.corpus import Corpus, Reader\nreader = Reader(Corpus.load({!r}), batch=8, context={})\nreader.read(0)"
    )
    steps = [count_lines(opened.format(str(tmp_path / "corpus"), context), "reader.read(0)") for context in (64, 1024)]
    assert steps[1] < 2 * steps[0]  # of Python, for sixteen times the tokens


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"context": 1.5}, "context must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"rank": 2, "world": 2}, "below world, got rank=2, world=2"),
        ({"world": 4}, "batch must be a multiple of world, got batch=6, world=4"),
    ],
)
def test_settings_that_cannot_be_are_refused(number_corpus, wrong, says):
    with pytest.raises(ConfigError, match=says):
        Reader(number_corpus, **{"batch": 6, "context": 5, **wrong})


def test_a_damaged_shard_is_found_while_reading(tmp_path):
    made = prepare_numbered_corpus(tmp_path, [50])
    path = tmp_path / "corpus" / "tokens-00001.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError, match=r"tokens-00001\.npy is damaged"):
        Reader(Corpus.load(made.folder), batch=5, context=10).read(0)


def order(count, seed, epoch):
    return shuffle_places(np.arange(count), count, seed, np.full(count, epoch)).tolist()


@given(st.integers(1, 700), st.integers(0, 2**63), st.integers(0, 2**40))
def test_every_place_goes_to_another_and_each_is_reached(count, seed, epoch):
    assert sorted(order(count, seed, epoch)) == list(range(count))


@given(st.integers(1, 300), st.integers(0, 99), st.lists(st.tuples(st.integers(0, 299), st.integers(0, 9)), min_size=1))
def test_where_a_place_goes_does_not_depend_on_the_rest_of_the_batch(count, seed, asked):
    places, epochs = np.array([(place % count, epoch) for place, epoch in asked]).T
    together = shuffle_places(places, count, seed, epochs).tolist()
    assert together == [order(count, seed, epoch)[place] for place, epoch in zip(places, epochs, strict=True)]
