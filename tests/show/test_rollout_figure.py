import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import regard
from regard import ConfigError
from regard.show.figure import format_word
from regard.show.rollout_figure import draw_rollout
from show.implicit_recordings import SiluAttention, record_implicit
from show.page.browser.recordings import draw_queries_and_keys, record_layers
from show.pictures import assert_readable
from show.small_recordings import record_long_text, record_small_model


def values(picture, rows, columns):
    return picture.axes[0].collections[0].get_array().reshape(rows, columns).filled()


def test_the_last_row_is_the_rollout_and_each_row_sums_to_one():
    picture = draw_rollout(record_small_model(), 9)
    found = values(picture, 2, 17)
    np.testing.assert_allclose(found[-1], regard.rollout(record_small_model(), [9])[0, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[0], regard.rollout(record_small_model(), [9], layers=[0])[0, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_words_of_a_long_text_are_added_in_bins():
    found = values(draw_rollout(record_long_text()), 1, 48)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    whole = regard.rollout(record_long_text(), [-1])[0, 0]
    assert found[0, 0] == pytest.approx(float(whole[: -(-700 // 48)].sum()), abs=1e-12)


def test_layers_without_a_softmax_have_two_hues_and_their_own_rows():
    recording = record_implicit(11, SiluAttention, SiluAttention)
    picture = draw_rollout(recording, 9, kind="implicit", row=1)
    found = values(picture, 2, 11)
    for layers, row in ([0], found[0]), ([0, 1], found[1]):
        expected = regard.rollout(recording, [9], layers=layers, kind="implicit")[1, 0]
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-12)
    assert (found < 0).any()
    assert picture.axes[0].collections[0].get_clim() == (-abs(found).max(), abs(found).max())
    assert_readable(picture)


def test_a_recording_without_layers_of_the_kind_is_refused():
    with pytest.raises(ConfigError, match="no layer of kind 'self' to roll out"):
        draw_rollout(record_implicit(11, SiluAttention), kind="self")


@pytest.mark.slow
def test_its_words_can_be_read():
    for picture in (draw_rollout(record_small_model(), title="a title"), draw_rollout(record_long_text())):
        assert_readable(picture)
    assert [label.get_text() for label in draw_rollout(record_small_model()).axes[0].get_xticklabels()][:3] == [
        "The",
        " cat",
        " saw",
    ]


def test_the_title_names_a_token_of_spaces_and_is_not_cut():
    picture = draw_rollout(record_layers(*draw_queries_and_keys(1, 1, 1), words=["  "]), 0)
    (axes,) = [one for one in picture.axes if one.get_title(loc="left") or one.get_title()]
    title = next(one for one in (axes._left_title, axes.title) if one.get_text())
    assert title.get_text() == "rollout to “␣␣”, token 0"
    assert title.get_window_extent(FigureCanvasAgg(picture).get_renderer()).x1 <= picture.bbox.width - 2


@pytest.mark.parametrize(
    ("word", "label"), [("\u200e", "\\u200e"), (" \xa0", " \\xa0"), ("  ", "␣␣"), ("a\u200db", "a\u200db")]
)
def test_no_label_of_a_token_is_invisible(word, label):
    assert format_word(word) == label
