import pytest
import torch
from rich.cells import cell_len

import regard
from regard.models import GPT2, GPT2Config
from regard.observe.head_kinds import heads
from regard.show.head_grids import MAX_TOKENS, render_grid, render_grids
from show.recorded import READ, WRITTEN, cross


@pytest.fixture(scope="module")
def recording():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=3, width=12, context=32, vocabulary=7)).double()
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.tensor([[1, 2, 3, 1, 2]]))
    recording.tokens = ["a", "[b]", "漢字", "long word", "\x1b"]
    return recording


def test_every_weight_of_every_head_is_its_tenths(recording):
    lines = [line.plain for line in render_grids(recording, heads(recording), 20, None)]
    squares = [number for number, line in enumerate(lines) if line[:1] in ("0", "1") and line[1:2] == "."]
    assert len(squares) == 6
    for start, (layer, head) in zip(squares, [(layer, head) for layer in range(2) for head in range(3)], strict=True):
        weights = recording.map(layer, head).dense()[0, 0]
        for query in range(5):
            said = lines[start + 1 + query].replace("·", "0").split()[-query - 1 :]
            assert [int(one) for one in said] == [min(int(10 * float(w)), 9) for w in weights[query, : query + 1]]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_squares_fit_on_the_screen(recording, width):
    for line in render_grids(recording, heads(recording), width, "truecolor"):
        assert cell_len(line.plain) <= width
        assert "\x1b" not in line.plain


def test_a_long_text_has_none(recording):
    found = heads(recording)
    recording.tokens, words = ["a"] * (MAX_TOKENS + 1), recording.tokens
    assert not list(render_grids(recording, found, 80, None))
    recording.tokens = words


def test_the_square_of_cross_attention_has_a_row_a_word_written_and_a_column_a_word_read():
    lines = [line.plain for line in render_grids(cross(), heads(cross(), kind="cross"), 80, None, "cross")]
    columns = " ".join(word.strip() for word in READ)
    assert lines[0] == f"weights in tenths: rows are queries, columns are keys: {columns}"
    dense = cross().map(0, kind="cross").dense()[0, 0]
    for line, word, row in zip(lines[2:], WRITTEN, dense, strict=True):
        assert line.split()[0] == word.strip()
        assert [int(one) for one in line.replace("·", "0").split()[1:]] == [min(int(10 * float(w) + 1e-6), 9) for w in row]


def test_keys_without_weight_are_hidden_ones_only_where_a_text_attends_to_itself():
    assert [line.plain for line in render_grid("x", ["a", "b"], torch.eye(2), None)] == ["x", "a  9", "b  · 9"]
    assert [line.plain for line in render_grid("x", ["a", "b"], torch.eye(2, 3), None)] == ["x", "a  9 · ·", "b  · 9 ·"]
