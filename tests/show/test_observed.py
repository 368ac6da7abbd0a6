import pytest
import torch

from observe.models import gpt2, words
from regard import ConfigError
from regard.observe import record
from regard.observe.heads import heads
from regard.show.head_figure import BINS, figure
from regard.show.observed import clearest, links, strongest, summary, table


@pytest.fixture(scope="module")
def recording():
    model = gpt2()
    with record(model) as found:
        model(words(2, 700))
    found.tokens = [f" w{n}" for n in range(700)]
    return found


def test_the_kinds_are_counted_in_a_sentence(recording):
    found = heads(recording)
    counts = [int(part.split()[0]) for part in summary(found).split(", ")]
    assert sum(counts) == len(found) == 12


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_keep_to_the_screen(recording, width):
    found = heads(recording)
    lines = [*table(found, width, whole=True), *links(recording, found, width)]
    assert all(line.cell_len <= width for line in lines[:-12] if "words" not in line.plain)
    assert len(lines) >= len(found) + 2


def test_a_short_table_has_the_clearest_of_each_kind(recording):
    found = heads(recording)
    short = clearest(found)
    assert {row.kind for row in short} == {row.kind for row in found}
    assert len(short) <= 3 * len({row.kind for row in found})


def test_the_strongest_link_is_the_largest_weight_that_is_neither_on_itself_nor_on_the_first_token(recording):
    head = recording.map(2, 1)
    query, key, weight = strongest(head)
    dense = head.dense()[0, 0].clone()
    best = dense.max(1)
    plain = (best.indices == 0) | (best.indices == torch.arange(700))
    expected = best.values.masked_fill(plain, -1).max()
    assert weight == pytest.approx(float(expected), abs=1e-5)
    assert dense[query, key] == pytest.approx(weight, abs=1e-6)


def test_a_few_tokens_are_drawn_with_their_words(recording):
    drawn = figure(recording, 1, 3, queries=slice(20, 30), keys=slice(15, 30))
    main = drawn.axes[0]
    assert [text.get_text() for text in main.get_yticklabels()] == [f" w{n}" for n in range(20, 30)]
    values = main.collections[0].get_array().reshape(10, 15)
    assert torch.allclose(torch.from_numpy(values.filled()).float(), recording.map(1, 3)[0, 0, 20:30, 15:30], atol=1e-6)


def test_many_tokens_are_drawn_in_bins_that_lose_no_strong_weight(recording):
    drawn = figure(recording, 1, 3)
    image = drawn.axes[0].images[0]
    assert image.get_array().shape == (BINS, BINS)
    assert float(image.get_array().max()) == pytest.approx(float(recording.map(1, 3).dense()[0].max()), abs=1e-6)


def test_what_is_not_there_is_refused(recording):
    with pytest.raises(ConfigError, match="something in it"):
        figure(recording, 0, 0, keys=slice(9, 9))
    with pytest.raises(ConfigError, match="head must be below 4"):
        figure(recording, 0, 4)
