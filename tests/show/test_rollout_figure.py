import numpy as np
import pytest

import regard
from regard.show.rollout_figure import draw_rollout
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


@pytest.mark.slow
def test_its_words_can_be_read():
    for picture in (draw_rollout(record_small_model(), title="a title"), draw_rollout(record_long_text())):
        assert_readable(picture)
    assert [label.get_text() for label in draw_rollout(record_small_model()).axes[0].get_xticklabels()][:3] == [
        "The",
        " cat",
        " saw",
    ]
