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


def test_columns_without_room_stand_below_beside_names_that_leave_room_for_two():
    titles, rows = ["name", "a", "bb", "c"], [["a name that is long", "1", "22", "333"], ["short", "4", "5", "6"]]
    assert text_table.align_in_blocks(titles, rows, 23) == [
        "name            a  bb",
        "a name that i…  1  22",
        "short           4   5",
        "name              c",
        "a name that i…  333",
        "short             6",
    ]
    assert text_table.align_in_blocks(titles, rows, 40) == text_table.align_columns(titles, rows, left=("name",))


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
