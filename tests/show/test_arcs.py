import pytest
import torch
from matplotlib.patches import Arc

import regard
from regard import ConfigError, OutOfRangeError
from regard.show.arcs import draw_arcs, place_words
from regard.show.figure import format_word
from show.implicit_recordings import SiluAttention, record_implicit
from show.pictures import assert_readable
from show.small_recordings import WORDS, record_long_text, record_small_model


def list_arcs(picture):
    return [patch for patch in picture.axes[0].patches if isinstance(patch, Arc)]


def test_there_is_an_arc_for_each_weight_from_the_least_on_between_its_words():
    dense = record_small_model().map(1, 2).dense()[0, 0]
    at, _ = place_words([format_word(word.strip(" ")) for word in WORDS])
    expected = {(i, j) for i in range(17) for j in range(i) if dense[i, j] >= 0.1}
    found = list_arcs(draw_arcs(record_small_model(), 1, 2, least=0.1))
    assert len(found) == len(expected) > 3
    for arc in found:
        pair = min(
            expected, key=lambda p: abs((at[p[0]] + at[p[1]]) / 2 - arc.center[0]) + abs(abs(at[p[0]] - at[p[1]]) - arc.width)
        )
        expected.remove(pair)
    assert not expected


def test_signed_entries_have_arcs_by_their_size_in_two_hues():
    recording = record_implicit(7, SiluAttention)
    dense = recording.map(0, 1, kind="implicit").dense()[1, 0]
    largest = float(dense.abs().max())
    off_diagonal = ~torch.eye(7, dtype=torch.bool)
    picture = draw_arcs(recording, 0, 1, kind="implicit", row=1, least=0.02)
    found = list_arcs(picture)
    expected = dense[off_diagonal & (dense.abs() >= 0.02 * largest)]
    expected = expected[expected.abs().argsort()]
    assert len(found) == len(expected) > 3
    assert (expected < 0).any()
    widths = torch.tensor([arc.get_linewidth() for arc in found], dtype=torch.float64)
    torch.testing.assert_close(widths, 0.4 + 3 * expected.abs() / largest, rtol=0, atol=1e-12)
    for arc, entry in zip(found, expected.tolist(), strict=True):
        red, _, blue, _ = arc.get_edgecolor()
        assert (blue > red) == (entry > 0)
    assert_readable(picture)


def test_layers_without_a_softmax_are_drawn_by_their_kind():
    with pytest.raises(OutOfRangeError, match="pass kind='implicit'"):
        draw_arcs(record_implicit(7, SiluAttention), 0, 1)


@pytest.mark.parametrize("end", [1, 2, 9, 17])
def test_its_words_can_be_read(end):
    assert_readable(draw_arcs(record_small_model(), 0, 1, queries=slice(0, end), keys=slice(0, end)))


def test_more_words_than_fit_are_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"at most 60 tokens, got 700: select some, e.g. queries=slice\(0, 30\)"):
        draw_arcs(record_long_text(), 0, 0)


def test_a_map_between_two_texts_is_refused(tmp_path):
    recording = cross()
    with pytest.raises(ConfigError, match="5 queries and 7 keys"):
        draw_arcs(recording, 0, 0, kind="cross")


def cross():
    """A recording of one text looking at another."""
    import torch

    layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    with regard.record(layer) as recording:
        layer(torch.randn(1, 5, 4), *[torch.randn(1, 7, 4)] * 2, need_weights=False)
    return recording
