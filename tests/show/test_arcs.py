import pytest
import torch
from matplotlib.patches import Arc

import regard
from regard import ConfigError, OutOfRangeError
from regard.show.arcs import draw_arcs, list_links, place_words
from regard.show.figure import format_word
from show.implicit_recordings import SiluAttention, record_implicit
from show.pictures import assert_readable, vectors
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


def test_a_stronger_weight_is_wider_and_lies_on_top():
    widths = [arc.get_linewidth() for arc in list_arcs(draw_arcs(record_small_model(), 1, 2))]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_a_row_or_some_keys_can_be_drawn_alone():
    dense = record_small_model().map(1, 2).dense()[0, 0]
    row = draw_arcs(record_small_model(), 1, 2, queries=slice(9, 10), least=0.01)
    assert len(list_arcs(row)) == int((dense[9, :9] >= 0.01).sum())
    without = list_links(dense[:, 1:].double().numpy(), 0, 1, 0.01)
    assert len(list_arcs(draw_arcs(record_small_model(), 1, 2, keys=slice(1, None), least=0.01))) == sum(
        i != j for _, i, j in without
    )


def test_words_are_counted_from_the_first_that_is_drawn():
    dense = record_small_model().map(1, 2).dense()[0, 0]
    key = 4 + int(dense[9, 4:8].argmax())
    arcs_drawn = list_arcs(draw_arcs(record_small_model(), 1, 2, queries=slice(9, 10), keys=slice(key, key + 1), least=0.0))
    at, _ = place_words([format_word(word.strip(" ")) for word in WORDS[key:10]])
    assert [arc.width for arc in arcs_drawn] == pytest.approx([at[-1] - at[0]])
    least = float(dense[9, key]) * (1 - 1e-10)  # which the same weight, computed with other rows, is not below
    arcs_drawn = list_arcs(draw_arcs(record_small_model(), 1, 2, queries=slice(2, 10), keys=slice(key, key + 1), least=least))
    at, _ = place_words([format_word(word.strip(" ")) for word in WORDS[2:10]])
    assert max(arc.width for arc in arcs_drawn) == pytest.approx(at[-1] - at[key - 2])


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


def test_many_words_stand_on_end():
    picture = draw_arcs(record_long_text(), 0, 1, queries=slice(100, 160), keys=slice(100, 160), title="a title")
    assert_readable(picture)
    assert {text.get_rotation() for text in picture.axes[0].texts if text.get_text().startswith("w1")} == {90.0}


@pytest.mark.slow
def test_it_is_written_as_vectors():
    assert "<image" not in vectors(draw_arcs(record_small_model(), 0, 1))


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


def test_the_note_speaks_of_tokens_which_need_not_be_words():
    notes = [text.get_text() for text in draw_arcs(record_small_model(), 1, 2).axes[0].texts]
    assert "weights of at least 0.05; a dot is a token's weight on itself" in notes
    signed = draw_arcs(record_implicit(7, SiluAttention), 0, 1, kind="implicit")
    assert any(text.get_text().endswith("a dot is a token's own entry") for text in signed.axes[0].texts)
