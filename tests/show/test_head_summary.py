from dataclasses import replace

import pytest
import torch

import regard
from observe.models import gpt2, words
from regard import AttentionMap, ConfigError
from regard.models import GPT2, GPT2Config
from regard.observe import record
from regard.observe.classification.head_classification import heads
from regard.observe.head_table import Heads
from regard.show.head_figure import BINS, figure
from regard.show.head_summary import (
    KIND_MEANINGS,
    find_strongest_link,
    render_grids,
    render_kinds,
    render_links,
    render_table,
    select_clearest,
)
from show.small_recordings import READ, WRITTEN, record_translator


def record_words(count):
    model = gpt2().double()
    with record(model) as found:
        model(words(2, count))
    found.tokens = [f" w{n}" for n in range(count)]
    return found


@pytest.fixture(scope="module")
def recording():
    """As many words as are drawn in bins."""
    return record_words(700)


@pytest.fixture(scope="module")
def short():
    """Few words, of which a table of all heads takes little time."""
    return record_words(90)


@pytest.fixture(scope="module")
def table(short):
    return heads(short)


@pytest.mark.slow
def test_the_kinds_are_counted_and_each_is_explained(table):
    said = [line.plain for line in render_kinds(table, 200)]
    assert sum(int(line.split()[0]) for line in said) == len(table) == 12
    for row in table:
        assert any(f" {row.kind} " in line and line.endswith(f"  {KIND_MEANINGS[row.kind]}") for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_keep_to_the_screen(short, table, width):
    lines = [
        *render_kinds(table, width),
        *render_table(table, width, show_all=True),
        *render_table(table, width, show_all=False),
    ]
    lines += render_links(short, table, width)
    assert all(line.cell_len <= width for line in lines)
    assert len(lines) >= len(table) + 2


def test_kinds_stand_in_the_order_of_what_they_tell_and_heads_without_a_clear_kind_last(table):
    kinds = ["unclear", "broad", "first token", "unclear", "local", "induction", "previous token"]
    some = Heads(tuple(replace(table.rows[n], kind=kind) for n, kind in enumerate(kinds)), ())
    ordered = ["induction", "previous token", "first token", "local", "broad", "unclear"]
    said = [line.plain for line in render_kinds(some, 200)]
    assert [line.split("  ")[0].removeprefix("1 ").removeprefix("2 ").strip() for line in said] == ordered
    assert list(dict.fromkeys(row.kind for row in select_clearest(some))) == ordered


def test_the_strongest_link_is_the_largest_weight_that_is_neither_on_itself_nor_on_the_first_token(recording):
    head = recording.map(2, 1)
    query, key, weight = find_strongest_link(head)
    dense = head.dense()[0, 0]
    best = dense.max(1)
    plain = (best.indices == 0) | (best.indices == torch.arange(700))
    expected = best.values.masked_fill(plain, -1).max()
    assert weight == pytest.approx(float(expected), rel=1e-10)
    assert float(dense[query, key]) == pytest.approx(weight, rel=1e-10)


def test_many_tokens_are_drawn_in_bins_that_lose_no_strong_weight(recording):
    drawn = figure(recording, 1, 3)
    image = drawn.axes[0].images[0]
    assert image.get_array().shape == (BINS, BINS)
    assert drawn.axes[0].get_xlabel() == "keys, in bins of 1.4 tokens"
    assert float(image.get_array().max()) == pytest.approx(float(recording.map(1, 3).dense()[0].max()), rel=1e-10)


def test_what_is_not_there_is_refused(recording):
    with pytest.raises(ConfigError, match="not empty"):
        figure(recording, 0, 0, keys=slice(9, 9))
    with pytest.raises(ConfigError, match="head must be one of the recorded heads, 0 to 3"):
        figure(recording, 0, 4)


def test_the_strongest_link_of_cross_attention_goes_from_one_text_to_the_other():
    found = heads(record_translator(), kind="cross")
    dense = record_translator().map(0, kind="cross").dense()[0, 0]
    query, key = divmod(int(dense.argmax()), len(READ))
    (_, line) = [
        line.plain
        for line in render_links(record_translator(), Heads(tuple(replace(row, kind="unclear") for row in found)), 80, "cross")
    ]
    assert line.endswith(f"{WRITTEN[query].strip()} → {READ[key].strip()}")
    assert line.split()[1] == f"{float(dense.max()):.2f}"


def test_after_padding_on_the_left_the_strongest_link_is_neither_of_padding_nor_on_the_first_token():
    scores = torch.zeros(1, 1, 6, 6)
    scores[..., 2] = scores[..., 1, 0] = 9  # the first token; and padding, which looks at padding
    scores[..., 5, 3] = 10
    hidden = ~(torch.ones(6, 6).tril() * (torch.arange(6) >= 2)).bool()
    bias = torch.zeros(1, 1, 6, 6).masked_fill(hidden, torch.finfo(torch.float32).min)
    m = AttentionMap(scores, torch.eye(6)[None, None], bias=bias, scale=1)
    assert find_strongest_link(m)[:2] == (5, 3)


@pytest.fixture(scope="module")
def short_recording():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=32, vocabulary=7)).double()
    with torch.no_grad(), regard.record(model) as few_words:
        model(torch.tensor([[1, 2, 3, 1, 2]]))
    few_words.tokens = ["a", "[b]", "漢字", "long word", "\x1b"]
    return few_words


def test_every_weight_of_every_head_is_its_tenths(short_recording):
    lines = [line.plain for line in render_grids(short_recording, heads(short_recording), 20, None)]
    squares = [number for number, line in enumerate(lines) if line[:1] in ("0", "1") and line[1:2] == "."]
    assert len(squares) == 6
    for start, (layer, head) in zip(squares, [(layer, head) for layer in range(2) for head in range(3)], strict=True):
        weights = short_recording.map(layer, head).dense()[0, 0]
        for query in range(5):
            said = lines[start + 1 + query].replace("·", "0").split()[-query - 1 :]
            assert [int(one) for one in said] == [min(int(10 * float(w)), 9) for w in weights[query, : query + 1]]


def test_the_square_of_cross_attention_has_a_row_a_word_written_and_a_column_a_word_read():
    lines = [
        line.plain for line in render_grids(record_translator(), heads(record_translator(), kind="cross"), 80, None, "cross")
    ]
    columns = " ".join(word.strip() for word in READ)
    assert lines[0] == f"weights in tenths: rows are queries, columns are keys: {columns}"
    dense = record_translator().map(0, kind="cross").dense()[0, 0]
    for line, word, row in zip(lines[2:], WRITTEN, dense, strict=True):
        assert line.split()[0] == word.strip()
        assert [int(one) for one in line.replace("·", "0").split()[1:]] == [min(int(10 * float(w) + 1e-6), 9) for w in row]
