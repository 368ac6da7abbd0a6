import math

import pytest

from regard.observe import text_table


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table.align_columns(["n", "kind", "x"], [["1", "broad", "0.25"], ["12", "日本", "3"]], left=("kind",)) == [
        " n  kind      x",
        " 1  broad  0.25",
        "12  日本      3",
    ]


def test_columns_fit_from_the_first_on():
    titles, rows = ["aa", "bb", "cc"], [["1", "123456", "1"]]
    assert [text_table.count_fitting_columns(titles, rows, width) for width in (1, 2, 9, 10, 13, 14)] == [0, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.126, "0.13"), (9.994, "9.99"), (9.996, "10.0"), (-12.34, "-12.3"), (99.96, "100"), (65535.4, "65535"), (math.nan, "-")],
)
def test_a_number_has_the_digits_it_has_room_for(number, text):
    assert text_table.format_score(number) == text


def test_a_word_is_short_and_steers_nothing():
    assert text_table.format_token("\x1b[31m\n") == "\\x1b[31m\\n"
    assert text_table.format_token("incomprehensibilities") == "incomprehensibi…"
    assert text_table.format_token("日本語" * 4) == "日本語日本語日…"
