import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from generate.small_models import table
from regard import ConfigError
from regard.generate import Settings, generate

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


def test_a_string_is_found_across_tokens_and_inside_one():
    class Wide:
        def bytes(self, ids):
            return b"".join((b"ab", b"cde", "é".encode()[:1], "é".encode()[1:])[number] for number in ids)

    assert Settings(stop="d", text=Wide()).has_ended([0, 1])
    assert Settings(stop="bc", text=Wide()).has_ended([0, 1])
    assert Settings(stop="é", text=Wide()).has_ended([2, 3])
    assert not Settings(stop="é", text=Wide()).has_ended([0, 2])


INTEGERS = [5, np.int64(5), np.uint8(5), torch.tensor(5), torch.tensor([5])]
NO_STOPS = [
    5.0,
    True,
    b"5",
    np.float32(5),
    torch.tensor(5.0),
    torch.tensor(True),
    {"5": 5},
    object(),
    int,
    torch.ones(1, 3).to_sparse(),
    torch.ones(2, dtype=torch.int64, device="meta"),
]


@pytest.mark.parametrize("token", INTEGERS)
def test_an_integer_of_any_library_is_a_token_to_end_at(token):
    for settings in (Settings(stop=token), Settings(stop=[3, token]), Settings(end=token)):
        assert 5 in settings.end_tokens
        assert all(type(one) is int for one in settings.end_tokens)
        assert settings.has_ended([1, 5])
    assert type(Settings(end=token).padding_token([1])) is int


@pytest.mark.parametrize("wrong", NO_STOPS)
def test_what_is_no_token_is_no_end(wrong):
    with pytest.raises(ConfigError, match="stop must be a whole number or a text, or a list of them, got"):
        Settings(stop=wrong)
    with pytest.raises(ConfigError, match="stop must be a whole number or a text, or a list of them, got"):
        Settings(stop=[3, wrong])
    with pytest.raises(ConfigError, match="end must be a whole number, a token, or None, got"):
        Settings(end=wrong)


@pytest.mark.parametrize("wrong", ["5", [5], torch.tensor([[5, 5]]), 2.5])
def test_an_end_is_one_token_and_no_list_is_a_stop_in_a_list(wrong):
    with pytest.raises(ConfigError, match="end must be a whole number"):
        Settings(end=wrong, text=Letters())
    if not isinstance(wrong, str):
        with pytest.raises(ConfigError, match="stop must be"):
            Settings(stop=[wrong])


@pytest.mark.parametrize("name", ["stop", "end"])
@pytest.mark.parametrize("token", [-1, 17, 10**30])
def test_an_end_outside_the_vocabulary_is_refused_before_anything_is_read(name, token):
    model = table(17)
    with pytest.raises(ConfigError, match=rf"{name} has .* not a token of this model: they are numbered from 0 to 16"):
        generate(model, [1, 2], 3, **{name: token})
    assert not model.calls
    assert len(list(generate(model, [1, 2], 3, **{name: 16}, temperature=0))) > 0


def test_an_unknown_setting_is_named():
    with pytest.raises(TypeError, match="temprature"):
        Settings(temprature=1)
    with pytest.raises(ConfigError):
        Settings(stop=["a", ""], text=Letters())
