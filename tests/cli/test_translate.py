import io
import re
import tomllib

import pytest

from regard.cli import main
from regard.evaluate.translation_scores import bleu, chrf, translate_sentences
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.text import BytePair
from regard.train.listeners.json_lines import read_rows
from text.pairs.small_pairs import make_pairs, write_pairs

SMALL = ["--pairs", "set", "--vocabulary", "280", "--width", "12", "--batch-tokens", "150", "--warmup", "2"]
SMALL += ["--evaluate-every", "5", "--layers", "1"]


@pytest.fixture(autouse=True)
def a_quiet_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_pairs(tmp_path, "some", make_pairs(60))
    for name, some in (("train", make_pairs(60)), ("val", make_pairs(70)[60:])):
        write_pairs(tmp_path / "set", name, some)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random translator with its vocabulary beside it."""
    sentences = [side for pair in make_pairs(60) for side in pair]
    model = RecurrentTranslator("additive", vocabulary=280, width=8, hidden=9)
    model.text = BytePair.train(sentences, 280)
    path = tmp_path_factory.mktemp("model") / "small"
    model.save(path)
    return str(path)


def run_translate(capsys, *arguments):
    code = main(["translate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def translate_and_escape(folder, sentences, **settings):
    found = translate_sentences(translator.load(folder), sentences, **settings)
    return [re.sub(r"[^ -~\u00a1-\uffff]", lambda x: x[0].encode("unicode_escape").decode(), one) for one in found]


@pytest.mark.parametrize(
    ("sentence", "says"),
    [
        ("some.en", "some.en is a file: --lines < some.en translates its lines."),
        ("missing.txt", "missing.txt is not a file. To translate it as words, pass it on standard input with --lines."),
        ("", "the text has no word to translate."),
        (" ", "the text has no word to translate."),
    ],
)
def test_the_name_of_a_file_and_an_empty_sentence_are_not_translated(capsys, folder, sentence, says):
    code, out, err = run_translate(capsys, "1 one", sentence, "--model", folder)
    assert (code, out, err) == (2, "", f"regard translate: {says}\n")


@pytest.mark.parametrize("beams", [1, 3])
def test_each_sentence_becomes_a_line(capsys, folder, beams):
    sentences = ["1 one", "2 two three"]
    code, out, err = run_translate(capsys, *sentences, "--model", folder, "--beams", str(beams))
    assert (code, err) == (0, "")
    assert out.split("\n") == [*translate_and_escape(folder, sentences, beams=beams), ""]


def test_lines_of_standard_input_become_as_many_lines_in_their_order(capsys, folder, monkeypatch):
    sentences = ["2 two three five", "1 one", "", "7 seven"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(sentences) + "\n"))
    code, out, err = run_translate(capsys, "--lines", "--model", folder)
    assert (code, err) == (0, "")
    assert out.split("\n") == [*translate_and_escape(folder, sentences), ""]
    assert out.split("\n")[2] == ""


@pytest.mark.slow
def test_files_are_evaluated_and_the_scores_are_signed(capsys, folder, tmp_path):
    code, out, err = run_translate(capsys, "--evaluate", "some.en", "some.fr", "--model", folder)
    sources, references = zip(*make_pairs(60), strict=True)
    found = list(translate_sentences(translator.load(folder), sources))
    assert (code, err) == (0, "")
    assert out.splitlines() == ["60 sentences", str(bleu(found, references)), str(chrf(found, references))]
    (tmp_path / "some.fr").write_text("un\n")
    code, _, err = run_translate(capsys, "--evaluate", "some.en", "some.fr", "--model", folder)
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith("some.en 60 and some.fr 1: line n must translate line n.\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [["--heads", "2"], ["--kind", "recurrent", "--attention", "additive", "--hidden", "9"]])
def test_sentence_pairs_become_a_translator_in_one_command_which_goes_on(capsys, tmp_path, kind):
    code, out, err = run_translate(capsys, "--train", *SMALL, *kind, "--steps", "6", "--sample-every", "5")
    assert (code, err) == (0, "")
    assert "sentence pairs, " in out
    assert "of peak" not in out  # whose operations are not counted
    assert "model: run/model, the best: " in out
    code, out, _ = run_translate(capsys, "--train", *SMALL, *kind, "--steps", "11")
    assert code == 0
    assert "resuming after step 6\n" in out
    assert [row["step"] for row in read_rows(tmp_path / "run" / "log.jsonl")] == [*range(1, 12)]
    code, out, err = run_translate(capsys, "1 one", "--model", "run/model")
    assert (code, err, out.count("\n")) == (0, "", 1)
    code, _, err = run_translate(capsys, "--train", *SMALL, *kind, "--steps", "11", "--dropout", "0.5")
    assert code == 2
    assert err.startswith("regard translate: model.dropout is 0.5, but the run in run has 0.1")


@pytest.mark.slow
def test_a_config_file_of_a_translator_is_trained_by_both_commands(capsys, tmp_path):
    (tmp_path / "small.toml").write_text(
        'pairs = "some"\nvocabulary = "280"\nbatch_tokens = 150\nevaluate_every = 0\n'
        '[model]\nkind = "recurrent"\nwidth = 12\nhidden = 7\n'
    )
    code, out, err = run_translate(capsys, "--train", "--config", "small.toml", "--steps", "2", "--hidden", "9", "--out", "one")
    assert (code, err) == (0, "")
    shown = tomllib.loads(out[: out.index("\n\n", out.index("[model]"))])
    assert (shown["model"]["hidden"], shown["model"]["dropout"], shown["label_smoothing"]) == (9, 0.1, 0.1)
    assert main(["train", "--config", "small.toml", "--steps", "2", "--out", "other"]) == 0
    shown = capsys.readouterr().out
    assert "hidden = 7\n" in shown
    assert "label_smoothing = 0.0\n" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of sentences, --lines, --evaluate, --train; got none"),
        (["a", "--lines"], "got sentences and --lines"),
        (["a", "--hidden", "3"], "--hidden is a setting of --train, which is not given"),
        (["a", "--model", "nowhere"], "nowhere has no settings.json"),
        (["--train", "--pairs", "none"], "none is not sentence pairs"),
        (["--train"], "a translator needs either corpus"),
        (["--train", "--kind", "gru"], "model.kind must be one of gpt2, recurrent, transformer"),
        (["--evaluate", "none.en", "none.fr", "--model", "{folder}"], "none.en cannot be read"),
        (["a", "--beams", "0", "--model", "{folder}"], "beams must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(capsys, folder, arguments, says):
    code, _, err = run_translate(capsys, *(one.format(folder=folder) for one in arguments))
    assert code == 2
    assert err.startswith("regard translate: ")
    assert says in err
    assert err.count("\n") == 1
