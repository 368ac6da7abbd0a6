import re
from dataclasses import fields
from pathlib import Path

import pytest

from regard import ConfigError
from regard.generate import Settings

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"


class Letters:
    def bytes(self, ids):
        return bytes(ord("a") + number for number in ids)


def test_the_documentation_has_every_setting_and_what_it_is_if_nothing_is_said():
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert list(table) == [field.name for field in fields(Settings)]
    for field in fields(Settings):
        assert (
            table[field.name] in ("none", "the model's") if field.default is None else eval(table[field.name]) == field.default
        )


def test_a_sequence_ends_with_its_last_tokens_alone():
    asked = Settings(end=7, stop=[5, "cd"], text=Letters())
    assert all(asked.has_ended(tokens) for tokens in ([7], [1, 5], [0, 2, 3]))
    assert not any(asked.has_ended(tokens) for tokens in ([7, 1], [5, 1], [3, 2], [2, 3, 0]))


def test_a_string_is_found_across_tokens_and_inside_one():
    class Wide:
        def bytes(self, ids):
            return b"".join((b"ab", b"cde", "é".encode()[:1], "é".encode()[1:])[number] for number in ids)

    assert Settings(stop="d", text=Wide()).has_ended([0, 1])
    assert Settings(stop="bc", text=Wide()).has_ended([0, 1])
    assert Settings(stop="é", text=Wide()).has_ended([2, 3])
    assert not Settings(stop="é", text=Wide()).has_ended([0, 2])


@pytest.mark.parametrize("stop", [5, "5", ["5"], (5, "x")])
def test_one_stop_is_as_good_as_a_list_of_one(stop):
    asked = Settings(stop=stop, text=Letters())
    assert asked.stops == (list(stop) if isinstance(stop, list | tuple) else [stop])


def test_what_follows_an_end_is_the_end_of_text_or_where_there_is_none_the_same_again():
    assert Settings(end=7).padding_token([1, 3]) == 7
    assert Settings().padding_token([1, 3]) == 3


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match="temprature"):
        Settings(temprature=1)
    with pytest.raises(ConfigError):
        Settings(stop=["a", ""], text=Letters())
