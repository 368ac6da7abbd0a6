import re

import pytest
import torch

import regard
from regard import ConfigError
from regard.show import recording_views
from regard.show.recording_views import render_bars
from regard.show.terminal_colors import TerminalArea
from show.small_recordings import WORDS, WRITTEN, record_small_model, record_translator

SCREEN = TerminalArea(80, 24, None)
BAR, CELL = 0.501e-3, 0.501e-2  # half a unit of the last digit: bars have three places, cells of a table two
ROW = torch.tensor([0.5, 0.0, 0.3, 0.1, 0.06, 0.04] + [0.0] * 11)


def test_a_head_is_named_by_its_layer_and_number():
    assert recording_views.parse_layer_head("3.5") == (3, 5)
    assert recording_views.parse_layer_head("12") == (12, None)
    for wrong in ("x", "3.", ".5", "3.5.1", "-1", "3,5"):
        with pytest.raises(ConfigError, match=r"like 3\.5"):
            recording_views.parse_layer_head(wrong)


def rows(lines):
    """The weights of bars, by the number of the key."""
    found = {}
    for line in lines:
        parts = line.plain.split()
        if len(parts) > 2 and parts[0].startswith("0.") and "," in line.plain[5:]:
            key = next(part for part in parts[2:] if part.rstrip(",").isdecimal() and part.endswith(","))
            found[int(key[:-1])] = float(parts[0])
    return found


@pytest.mark.parametrize("place", [(1, 2), (1, None), None])
def test_the_bars_of_a_word_are_its_row_of_the_head_or_the_mean(place):
    recording = record_small_model()
    dense = torch.stack([recording.map(layer).dense()[0] for layer in range(2)])
    row = {(1, 2): dense[1, 2, 9], (1, None): dense[1, :, 9].mean(0), None: dense[:, :, 9].mean((0, 1))}[place]
    lines = list(recording_views.render_row(recording, place, "saw", SCREEN, show_all=True))
    found = rows(lines)
    assert len(found) >= 3
    for key, weight in found.items():
        assert weight == pytest.approx(float(row[key]), abs=BAR)


def test_the_words_are_shaded_by_what_they_receive_and_the_scale_says_how_much():
    said = [line.plain for line in recording_views.render_text(record_small_model(), SCREEN, show_all=False)]
    assert said[1].startswith("The cat saw the dog, and")
    assert said[-1].startswith("· below ")


@pytest.mark.parametrize("place", [(1, 2), (1, None), None])
def test_a_word_of_a_translation_looks_at_words_of_its_source(place):
    recording = record_translator("transformer")
    dense = torch.stack([recording.map(layer, kind="cross").dense()[0] for layer in range(2)])
    row = {(1, 2): dense[1, 2, 1], (1, None): dense[1, :, 1].mean(0), None: dense[:, :, 1].mean((0, 1))}[place]
    said = [line.plain for line in recording_views.render_row(recording, place, "chat", SCREEN, show_all=True, kind="cross")]
    assert said[0].startswith("what 'chat', token 1, attended to: ")
    assert not any("back" in line or "[" in line for line in said)  # no word of a source is the one that asks
    bars = [line.split() for line in said if line[:2] in ("0.", "1.") and "#" in line]
    found = {int(parts[-2]): float(parts[0]) for parts in bars}
    assert found == pytest.approx({n: float(weight) for n, weight in enumerate(row) if weight >= 5e-4}, abs=BAR)
    with pytest.raises(ConfigError, match=r"'cat' is neither a word of the text .* words are 'un', 'chat', 'dort'"):
        list(recording_views.render_row(recording, place, "cat", SCREEN, show_all=True, kind="cross"))


def test_rows_of_cross_attention_are_words_of_the_one_text_and_columns_are_named_by_the_other():
    said = [line.plain for line in recording_views.render_head(record_translator(), (0, 0), SCREEN, "cross")]
    dense = record_translator().map(0, kind="cross").dense()[0, 0]
    for line, word, row in zip(said[2:], WRITTEN, dense, strict=False):
        assert line.split()[1] == word.strip()
        assert [float(cell) for cell in line.split()[2:]] == pytest.approx(row.tolist(), abs=CELL)
    assert "The columns: 0\xa0a, 1\xa0cat, 2\xa0is, 3\xa0asleep, 4\xa0⟨end⟩." in " ".join(said)
    assert not any("The columns" in line.plain for line in recording_views.render_head(record_small_model(), (0, 0), SCREEN))


def test_the_largest_weights_come_first_each_with_its_word_its_place_and_how_far_back():
    lines = [line.plain for line in render_bars(ROW, WORDS, 5, TerminalArea(80, 24, None))]
    assert [float(line[:5]) for line in lines] == [0.5, 0.3, 0.1, 0.06, 0.04]
    assert re.match(r"0\.500  The +0, 5 back +#+$", lines[0])
    assert re.match(r"0\.300  saw +2, 3 back +#+$", lines[1])
    assert "5, itself" in lines[-1]


def test_what_is_left_out_is_summed_so_that_the_whole_row_is_described():
    *shown, rest = [line.plain for line in render_bars(ROW, WORDS, 5, TerminalArea(80, 24, None), most=2)]
    assert rest == "0.200  on 3 others"
    assert len(shown) == 2


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("colours", [None, "256"])
def test_bars_are_as_long_as_their_weights_and_keep_to_the_screen(width, colours):
    lines = list(render_bars(ROW, WORDS, 5, TerminalArea(width, 24, colours)))
    assert all(line.cell_len <= width for line in lines)
    longest = [line.plain.count("#" if colours is None else "█") for line in lines]
    assert longest == sorted(longest, reverse=True)
    if width >= 40:
        assert longest[1] == pytest.approx(0.6 * longest[0], abs=1)


class Attention(torch.nn.Module):
    """Attention of what it is given."""

    def forward(self, q, k):
        return regard.attention(q, k, k, regard.Causal())


def record_broken_query(broken: bool) -> regard.Recording:
    """Two heads on seven words; query 4 of the second may be NaN."""
    q, k = torch.randn(2, 1, 2, 7, 4, generator=torch.Generator().manual_seed(0))
    if broken:
        q[0, 1, 4] = torch.nan
    with regard.record(layer := Attention()) as recording:
        layer(q, k)
    recording.tokens = [f" w{n}" for n in range(7)]
    return recording


@pytest.mark.parametrize("colors", [None, "256", "truecolor"])
def test_a_row_of_a_head_that_is_nan_is_said_to_be_and_the_others_stay(colors):
    window = TerminalArea(80, 24, colors)
    expected, found = (
        [line.plain.rstrip() for line in recording_views.render_head(record_broken_query(broken), (0, 1), window)]
        for broken in (False, True)
    )
    changed = [n for n, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other]
    assert [found[n].split()[:2] for n in changed] == [["4", "w4"]]
    assert found[changed[0]].split()[2:] == ["nan"] * 7
    assert found[-1] == "7 of 49 numbers are not a number (NaN): nan or ?."
