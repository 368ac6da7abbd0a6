import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel, GPT2TokenizerFast, MambaConfig, MambaForCausalLM, T5Config, T5Model

from regard import DataError
from regard.cli import main
from regard.cli.model_loading import is_only_in_cache
from regard.observe import load, record
from regard.text.byte_pair import GPT2_FOLDER

TEXT = "the cat saw the dog, and the dog saw the cat. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model as transformers saves one, with random weights and GPT-2's own words."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    GPT2LMHeadModel(TheirConfig(n_layer=2, n_head=4, n_embd=32, n_positions=64, initializer_range=0.3)).save_pretrained(place)
    GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")).save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def look(capsys, *arguments):
    code = main(["look", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_the_table_is_csv_with_the_numbers_of_the_json(capsys, folder):
    rows = json.loads(look(capsys, TEXT, "--model", folder, "--json")[1])
    code, out, err = look(capsys, TEXT, "--model", folder, "--csv")
    lines = list(csv.DictReader(out.splitlines()))
    assert (code, err, len(lines)) == (0, "", len(rows))
    for line, row in zip(lines, rows, strict=True):
        assert {name: line[name] for name in ("layer", "head", "kind", "sentence")} == {
            name: str(row[name]) for name in ("layer", "head", "kind", "sentence")
        }
        for name, score in row["scores"].items():
            for part, value in score.items():
                column = name if part == "mean" else f"{name} {part}"
                assert line[column] == ("" if value is None else str(value))
    assert "leave out --head" in look(capsys, TEXT, "--model", folder, "--csv", "--head", "0.1")[2]


@pytest.mark.parametrize(
    "arguments", [("look", "CAB", "--model", "sorter"), ("heads", "--model", "pocket"), ("heads", "one.reg")]
)
def test_two_formats_of_the_table_are_refused(capsys, arguments):
    code = main([*arguments, "--json", "--csv"])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err == f"regard {arguments[0]}: --json and --csv are two formats of one table: leave out one of them.\n"


@pytest.mark.parametrize("shown", [("--head", "1.1"), ("--query", "2")])
@pytest.mark.parametrize("option", [("--json",), ("--csv",), ("--kind", "local"), ("--sort", "prev")])
def test_options_of_the_table_are_refused_where_one_head_or_row_is_shown(capsys, shown, option):
    code, out, err = look(capsys, "CABBAC", "--model", "sorter", *shown, *option)
    assert (code, out) == (2, "")
    assert err == f"regard look: {option[0]} is for the table of the heads: leave out --head and --query.\n"


@pytest.mark.parametrize("command", ["look", "generate", "serve"])
def test_a_device_that_is_not_there_is_said_in_one_line(capsys, command):
    text = [] if command == "serve" else ["CAB"]
    assert main([command, *text, "--model", "sorter", "--device", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert f"regard {command}: --device nowhere cannot be used" in err
    assert "The devices here: cpu" in err


@pytest.mark.slow
def test_a_text_through_a_folders_model_gives_the_kinds_of_its_heads_and_their_links(capsys, folder):
    code, out, err = look(capsys, TEXT, "--model", folder, "--all")
    assert code == 0
    assert err == ""
    assert re.search(r"2 layers, 8 heads\. 40 tokens in \d+\.\d s\.", out)
    rows = re.findall(r"^[01]\.[0-3] +[a-z ]+ +[\d.-]+", out, re.MULTILINE)
    assert len(rows) >= 8
    assert "prev" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_what_is_saved_is_what_heads_reads(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would be broken over two lines
    file, saved = Path("text.txt"), Path("cat.regard")
    file.write_text(TEXT)
    _, out, _ = look(capsys, file, "--model", folder, "--out", saved, "--all")
    assert f"Saved to {saved}" in " ".join(out.split())
    recording = load(saved)
    assert recording.tokens[:5] == ["the", " cat", " saw", " the", " dog"]
    assert recording.map(1).shape == (1, 4, 40, 40)
    assert main(["heads", str(saved), "--all"]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[2:] == out.splitlines()[-len(again.splitlines()) + 2 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("words", "--model", "no-such-model", "--kind", "wizard"), "--kind must be one of 'induction', 'prefix matching', "),
        (("words", "--model", "{folder}", "--kind", "stripe"), "no head is of kind 'stripe'; the kinds here are"),
        (("words", "--model", "{folder}", "--sort", "wizardry"), "there is no score 'wizardry'; the scores are previous"),
        (("words", "--model", "{folder}", "--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("absent.txt", "--model", "{folder}"), "absent.txt is not a file"),
        (("absent.rst", "--model", "{folder}"), "absent.rst is not a file"),
        (("some/where/absent.py", "--model", "{folder}"), "absent.py is not a file"),
        (("{tmp}", "--model", "{folder}"), "is a folder: give a file in it"),
        (
            ("words", "--model", "no-such-model"),
            "there is no folder no-such-model, and that name could not be found on the hub",
        ),
        (("words", "--model", "/no/such/folder"), "/no/such/folder is neither a folder nor a name on the hub"),
        (("words", "--model", "{tmp}"), "it holds none of these"),
        (("words", "--model", "{tmp}/absent.gguf"), "absent.gguf is not a file"),
        (("", "--model", "{folder}"), "the text has no tokens"),
        (("words", "--model", ""), "--model must be the name or the folder of a model; got ''."),
        (("words", "--model", "no-such-model", "--page", ""), "--page must be the path of a file or folder; got ''."),
        (("words", "--model", "{folder}", "--keep", "int3"), "keep takes bfloat16"),
        (("words", "--model", "{folder}", "--head", "first"), "like 3.5"),
        (("words", "--model", "{folder}", "--head", "0.4"), "head must be one of the recorded heads, 0 to 3"),
        (("some words", "--model", "{folder}", "--query", "wizard"), "'wizard' is neither a word of the text"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(capsys, folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = look(capsys, *(one.format(folder=folder, tmp=tmp_path) for one in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("regard look: ")
    assert says in err
    assert err.count("\n") == 1


def test_a_model_that_the_hub_cannot_be_asked_for_is_taken_from_its_cache(folder, tmp_path, monkeypatch):
    kept = tmp_path / "models--one--two" / "snapshots" / "0"
    shutil.copytree(folder, kept)
    (tmp_path / "models--one--two" / "refs").mkdir()
    (tmp_path / "models--one--two" / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert is_only_in_cache("one/two")
    with pytest.raises(DataError, match="there is no folder one/three"):
        is_only_in_cache("one/three")


def test_the_model_in_the_box_is_looked_at_and_reads_as_many_letters_as_it_can(capsys):
    code, out, err = look(capsys, "CBABBCABBBCC", "--model", "sorter", "--all")
    assert (code, err) == (0, "")
    assert "sorter: 3 layers, 9 heads. 11 of 12 tokens in" in out
    assert len(re.findall(r"^[012]\.[012]  ", out, re.MULTILINE)) >= 9


@pytest.mark.slow
def test_the_words_are_shaded_by_digits_where_there_is_no_colour(capsys, folder):
    _, out, _ = look(capsys, TEXT, "--model", folder)
    lines = out.splitlines()
    start = lines.index("the share of all attention, in all heads, that each token receives:")
    assert lines[start + 1].startswith("the cat saw the dog, and the dog saw the cat. the cat")
    assert set(lines[start + 2]) <= set(" ·123456789")
    assert "\x1b" not in out


@pytest.mark.slow
def test_a_head_is_drawn_and_a_row_written_as_bars(capsys, folder):
    code, out, err = look(capsys, TEXT, "--model", folder, "--head", "1.2")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("layer 1, head 2: ")
    assert len(re.findall(r"^ ?\d+ ", out, re.MULTILINE)) == 40
    code, out, err = look(capsys, TEXT, "--model", folder, "--head", "1.2", "--query", "dog")
    assert (code, err) == (0, "")
    assert "It occurs 6 times, and this is the last" in out
    assert len(re.findall(r"^0\.\d{3}  .*#", out, re.MULTILINE)) >= 3


@pytest.mark.slow
def test_of_an_encoder_decoder_the_encoder_is_shown(capsys, tmp_path):
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 32, "num_layers": 2, "vocab_size": 50257}
    T5Model(T5Config(**sizes)).save_pretrained(tmp_path)
    GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")).save_pretrained(tmp_path)
    code, out, _ = look(capsys, "the cat saw the dog", "--model", tmp_path)
    assert code == 0
    assert "2 layers, 8 heads. 5 tokens" in out


def head(capsys, *arguments):
    code = main(["heads", *map(str, arguments)])
    said = capsys.readouterr()
    return code, " ".join(said.out.split()), said.err


@pytest.mark.slow
def test_why_prints_the_words_that_moved_the_next_word_as_the_pulls_of_all_heads(capsys, folder):
    code, out, err = look(capsys, TEXT, "--model", folder, "--why", "dog", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokenizer = GPT2TokenizerFast.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with record(model, keep="values") as recording:
        logits = model(ids).logits[0, -1]
    token = tokenizer.encode(" dog")[0]
    attribution = recording.attribute(logits[token])
    pulls = torch.stack([attribution.map(layer).dense()[0].sum(1) for layer in range(2)])
    assert found["word"] == " dog"
    assert found["probability"] == pytest.approx(float(logits.softmax(-1)[token].detach()), rel=1e-4)
    assert sorted(row["position"] for row in found["words"]) == list(range(ids.shape[1]))
    scale = float(pulls.abs().max())
    for row in found["words"]:
        assert row["pull"] == pytest.approx(float(pulls[:, :, row["position"]].sum()), abs=1e-4 * scale)
        layer, head = map(int, row["head"].split("."))
        assert abs(row["head_pull"]) == pytest.approx(float(pulls[:, :, row["position"]].abs().max()), abs=1e-4 * scale)
        assert row["head_pull"] == pytest.approx(float(pulls[layer, head, row["position"]]), abs=1e-4 * scale)
    sizes = [abs(row["pull"]) for row in found["words"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["weight"] for row in found["words"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_a_model_with_damaged_weights_is_described_and_its_json_has_null(capsys, folder, tmp_path):
    damaged = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        damaged.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    damaged.save_pretrained(tmp_path)
    GPT2TokenizerFast.from_pretrained(folder).save_pretrained(tmp_path)
    capsys.readouterr()
    code, out, err = look(capsys, TEXT, "--model", tmp_path)
    assert (code, err) == (0, "")
    assert "not a number (NaN)" in out
    code, out, err = look(capsys, TEXT, "--model", tmp_path, "--why", "dog", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {row["pull"] for row in found["words"]} == {found["probability"]} == {None}


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    """A state space model as transformers saves one, with random weights and GPT-2's own words."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("mamba")
    config = MambaConfig(vocab_size=50257, hidden_size=16, num_hidden_layers=3, state_size=4)
    MambaForCausalLM(config).save_pretrained(place)
    GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")).save_pretrained(place)
    return place
