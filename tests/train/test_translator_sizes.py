import inspect

import pytest

from regard import ConfigError
from regard.models.translator import KINDS
from regard.train.translator_sizes import TranslatorSizes, list_arguments


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_said_is_the_models_own_default(kind):
    sizes = TranslatorSizes(kind, {"width": 32, "vocabulary": 17})
    theirs = inspect.signature(KINDS[kind]).parameters
    assert sizes.sizes == {**{name: one.default for name, one in theirs.items()}, "width": 32, "vocabulary": 17}
    assert {*list_arguments(kind)} == {*theirs}
    assert sizes.make_translator().sizes["width"] == 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_sizes_makes_them_again(kind):
    sizes = TranslatorSizes(kind, {"width": 32})
    table = sizes.to_table()
    assert None not in table.values()
    assert TranslatorSizes(table.pop("kind"), table) == sizes


@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        ("transformer", {"width": 33}, "width must be a multiple of heads"),
        ("recurrent", {"cell": "rnn"}, "cell must be one of"),
        ("recurrent", {"hidden": "large"}, "hidden"),
        ("recurrent", {"dropout": "some"}, "dropout|a size in"),
        ("convolutional", {}, "model.kind must be one of gpt2, recurrent, transformer; got 'convolutional'"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_made(kind, wrong, says):
    with pytest.raises(ConfigError, match=says):
        TranslatorSizes(kind, wrong)
