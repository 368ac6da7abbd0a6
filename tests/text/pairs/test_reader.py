import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError
from regard.text.pairs import PairReader, prepare
from regard.text.pairs.reader import NO_TARGET
from text.pairs.small_pairs import make_pairs, write_pairs

COUNT = 101


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return prepare(write_pairs(folder, "some", make_pairs(COUNT)), folder / "made", vocabulary=300, valid=0.0, test=0.0).train


def sentences(part, batch):
    """The pairs of a batch as texts."""
    end = part.text.end
    found = []
    for source, length, target in zip(batch.sources.tolist(), batch.lengths.tolist(), batch.targets.tolist(), strict=True):
        target = [token for token in target if token != NO_TARGET]
        if target:
            assert (source[length - 1], target[-1]) == (end, end)
            found.append((part.text.decode(source[: length - 1]), part.text.decode(target[:-1])))
    return found


@pytest.mark.slow
@given(st.integers(1, 200), st.integers(0, 3), st.integers(0, 2**40), st.integers(1, 3))
def test_every_pair_is_read_once_an_epoch_by_all_ranks_together(part, tokens, epoch, seed, world):
    readers = [PairReader(part, tokens, seed, rank, world) for rank in range(world)]
    first, last = epoch * readers[0].batches, (epoch + 1) * readers[0].batches
    read = Counter(pair for reader in readers for n in range(first, last) for pair in sentences(part, reader.read(n)))
    assert read == Counter(make_pairs(COUNT))


@given(st.integers(0, 99), st.integers(1, 200))
def test_a_target_is_predicted_from_what_stands_before_it_and_padding_is_nothing(part, n, tokens):
    batch = PairReader(part, tokens, seed=3).read(n)
    assert {x.dtype for x in (batch.sources, batch.lengths, batch.before, batch.targets)} == {torch.int64}
    assert batch.before.shape == batch.targets.shape
    assert len(batch.sources) == len(batch.lengths) == len(batch.targets)
    assert batch.sources.shape[1] == int(batch.lengths.max())
    for source, length in zip(batch.sources, batch.lengths.tolist(), strict=True):
        assert not source[length:].any()
    for before, targets in zip(batch.before.tolist(), batch.targets.tolist(), strict=True):
        real = targets.index(part.text.end) + 1
        assert before[:real] == [part.text.end, *targets[: real - 1]]
        assert set(targets[real:]) <= {NO_TARGET}
        assert set(before[real:]) <= {0}
    assert batch.tokens == int(batch.lengths.sum()) + int((batch.targets != NO_TARGET).sum())


@given(st.integers(30, 300))
def test_a_batch_has_about_so_many_tokens_and_sentences_of_about_one_length(part, tokens):
    reader = PairReader(part, tokens)
    spreads = []
    for n in range(reader.batches):
        batch = reader.read(n)
        assert max(batch.sources.numel(), batch.targets.numel()) <= tokens or len(batch.lengths) == 1
        longer = torch.maximum(batch.lengths, (batch.targets != NO_TARGET).sum(1))
        spreads.append(int(longer.max() - longer.min()))
    if tokens < 100:
        assert sum(spreads) / len(spreads) < 2
    assert reader.batches < 1.5 * (part.lengths.max(1) + 1).sum() / tokens + 5


def are_equal(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("sources", "lengths", "before", "targets"))


@pytest.mark.slow
@given(st.permutations(range(12)))
def test_a_batch_is_the_same_whatever_was_read_before(part, order):
    reader, again = (PairReader(part, 60, seed=5) for _ in range(2))
    straight = [reader.read(n) for n in range(12)]
    assert all(are_equal(again.read(n), straight[n]) for n in order)


OTHER = """
import json, sys
from regard.text.pairs import PairReader, Pairs
reader = PairReader(Pairs.load(sys.argv[1]).train, 60, seed=5)
print(json.dumps([reader.read(n).sources.tolist() for n in (1000, 3)]))
"""


@pytest.mark.slow
def test_a_batch_is_the_same_in_another_process(tmp_path):
    made = prepare(write_pairs(tmp_path, "some", make_pairs(COUNT)), tmp_path / "made", vocabulary=300, valid=0.0, test=0.0)
    ran = subprocess.run([sys.executable, "-c", OTHER, str(made.folder)], capture_output=True, text=True, check=True)
    reader = PairReader(made.train, 60, seed=5)
    assert json.loads(ran.stdout) == [reader.read(n).sources.tolist() for n in (1000, 3)]


def test_epochs_and_seeds_differ_in_the_order_of_batches_and_in_what_is_in_them(part):
    def epoch(number, seed):
        reader = PairReader(part, 60, seed)
        return [tuple(sentences(part, reader.read(number * reader.batches + n))) for n in range(reader.batches)]

    orders = [epoch(number, seed) for seed in (0, 1) for number in (0, 1, 2)]
    assert len({tuple(map(len, order)) for order in orders}) == 6
    assert len({frozenset(map(frozenset, order)) for order in orders}) == 6


@given(st.integers(0, 50), st.integers(2, 4), st.integers(1, 90))
def test_the_rows_of_all_ranks_are_those_of_one(part, n, world, tokens):
    whole = PairReader(part, tokens, seed=1).read(n)
    parts = [PairReader(part, tokens, 1, rank, world).read(n) for rank in range(world)]
    assert Counter(pair for one in parts for pair in sentences(part, one)) == Counter(sentences(part, whole))
    assert {one.tokens for one in parts} == {whole.tokens}
    counts = [int((one.targets != NO_TARGET).any(1).sum()) for one in parts]
    assert max(counts) - min(counts) <= 1
    assert all(len(one.lengths) for one in parts)  # a rank without a row has one that says nothing


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"rank": 2, "world": 2}, "below world, got rank=2, world=2"),
    ],
)
def test_settings_that_cannot_be_are_refused(part, wrong, says):
    with pytest.raises(ConfigError, match=says):
        PairReader(part, **{"tokens": 60, **wrong})
