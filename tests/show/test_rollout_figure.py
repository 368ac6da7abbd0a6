import numpy as np
import pytest

import regard
from regard import ConfigError
from regard.show.rollout_figure import draw_rollout
from show.implicit_recordings import SiluAttention, record_implicit
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
