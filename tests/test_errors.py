import pickle
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import regard
from regard import errors
from regard.errors import MissingNameError, OutOfRangeError, RegardError

CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, RegardError)]


@pytest.mark.parametrize("error", CLASSES)
def test_each_error_is_public_and_comes_back_from_another_process(error):
    assert getattr(regard, error.__name__) is error
    again = pickle.loads(pickle.dumps(error("what was expected: 'a'")))
    assert type(again) is error
    assert str(again) == "what was expected: 'a'"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (regard.ShapeError, ValueError),
        (regard.ConfigError, ValueError),
        (OutOfRangeError, IndexError),
        (OutOfRangeError, regard.ShapeError),
        (OutOfRangeError, regard.ConfigError),
        (MissingNameError, KeyError),
        (MissingNameError, regard.ConfigError),
    ],
)
def test_an_error_is_the_one_that_a_python_programmer_expects(error, builtin):
    with pytest.raises(builtin, match=r"^there is no layer 'h\.9'$"):
        raise error("there is no layer 'h.9'")


@pytest.mark.parametrize("error", CLASSES)
@given(before=st.text(max_size=40), part=st.text(max_size=40), repeats=st.integers(0, 90), after=st.text(max_size=40))
@example(before="\x1b]52;", part="a", repeats=900, after="\x07")
@example(before="", part="\udcff", repeats=100, after="")
def test_a_message_has_at_most_500_characters_that_print_and_begins_and_ends_as_it_was_written(
    error, before, part, repeats, after
):
    middle = part * repeats
    shown = str(error(before + middle + after))
    assert len(shown) <= 500
    assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown) is None
    if all(one.isprintable() for one in before + middle + after):
        assert shown.startswith(before)
        assert shown.endswith(after)
        assert len(before + middle + after) > 500 or shown == before + middle + after


def test_a_message_of_megabytes_says_how_long_it_was_and_keeps_what_to_do():
    shown = str(regard.DataError(f"{'ab' * 2_500_000!r} is not a letter of this model. Train a model on text that has it."))
    assert re.fullmatch(
        r"'(ab)+a? \[\.\.\. 5,000,0\d\d characters in all \.\.\.\] .*Train a model on text that has it\.", shown
    )
    assert len(shown) == 500


def test_an_error_of_no_text_is_as_any_other():
    assert str(RegardError()) == ""
    assert RegardError("a\x1b", 3).args == ("a\\x1b", 3)
