import pytest

import regard.cli
from regard.cli.serve import load_page_model
from regard.models.recurrent import RecurrentTranslator
from regard.weights.translator_weights import INCLUDED_TRANSLATORS
from show.page.translators import READ, small


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder as regard translate --train leaves it."""
    monkeypatch.chdir(tmp_path)
    small("additive").save("run/model")
    return "run/model"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "256.0.0.1"], "cannot be used"),  # with the pocket model
        (["nowhere.reg", "--text", "CAB"], "give one with --model"),
        (["--model", "sorter", "--port", "70000"], "below 65536"),
        (["--model", "sorter", "--text", "xyz"], "not a letter of this model"),
        (["--model", "sorter", "--host", "256.0.0.1"], "cannot be used"),
        (["nowhere.reg"], "nowhere.reg"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_2(arguments, says, capsys):
    assert regard.cli.main(["serve", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.slow
def test_a_folder_that_is_a_translators_and_a_carried_ones_name_translate(run, tmp_path, monkeypatch):
    monkeypatch.setitem(INCLUDED_TRANSLATORS, "translator", tmp_path / run)
    assert [load_page_model(name).name for name in (run, "translator")] == ["run", "translator"]
    assert load_page_model(run).encode_sentence(READ) == load_page_model("translator").encode_sentence(READ)
    assert load_page_model("sorter").name == "sorter"


@pytest.mark.slow
def test_a_translator_that_cannot_be_served_is_one_line_and_2(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(INCLUDED_TRANSLATORS, "translator", tmp_path / "nothing")
    RecurrentTranslator(vocabulary=7, width=3, hidden=2).save("plain")
    for arguments, says in (
        (["--model", "translator"], "is not in this package"),
        (["--model", "plain"], "no attention to show"),
        (["--model", run, "--text", " "], "no word to translate"),
        (["--model", run, "--text", READ, "--host", "256.0.0.1"], "cannot be used"),
    ):
        assert regard.cli.main(["serve", *arguments]) == 2
        said = capsys.readouterr()
        assert says in said.err
        assert (said.err.count("\n"), said.out) == (1, "")
