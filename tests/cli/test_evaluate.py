import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel, GPT2TokenizerFast

from regard.cli import evaluate, main
from regard.evaluate import lambada, perplexity, stop_tokens, wikitext
from regard.models import GPT2, GPT2Config
from regard.text import BytePair
from regard.text.byte_pair import GPT2_FOLDER
from regard.text.corpus import prepare

pytestmark = pytest.mark.usefixtures("screen_of_80_columns")
TEXT = "the cat sat on the mat, and the dog saw the cat again and again.\n" * 9
WIKI = " = A title = \n \n A guest @-@ star , who is ( now ) here . \n" * 5
BATCH = 4  # of `regard evaluate` by default: the same windows at a time give the same digits
PASSAGES = ["the cat sat on the mat", "and the dog saw the cat", "the cat sat on and on"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A small random model with its vocabulary beside it."""
    text = BytePair.train([TEXT], 290)
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=2, width=16, context=29, vocabulary=text.vocabulary)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    model.text = text
    path = tmp_path_factory.mktemp("model") / "own"
    model.save(path)
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """One as transformers saves it, with GPT-2's words."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "theirs"
    GPT2LMHeadModel(TheirConfig(n_layer=2, n_head=2, n_embd=16, n_positions=29)).save_pretrained(path)
    GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")).save_pretrained(path)
    return path


def run_evaluate(capsys, model, on, *arguments):
    code = main(["evaluate", "--model", str(model), "--on", str(on), *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def numbers(out):
    """What was measured, by its label."""
    found = (re.match(r"(\S.*?)\s{2,}(\S+)", line) for line in out.splitlines())
    return {one[1]: one[2] for one in found if one and one[1] not in ("perplexity  measured", "last words")}


def test_a_text_is_scored_as_the_library_scores_it(own, capsys, tmp_path):
    (tmp_path / "some.txt").write_text(TEXT)
    model = GPT2.load(own)
    found = perplexity(
        model, model.text.encode(TEXT), context=29, stride=14, batch=BATCH, words=len(TEXT.split()), bytes=len(TEXT.encode())
    )
    code, out, err = run_evaluate(capsys, own, tmp_path / "some.txt")
    assert (code, err) == (0, "")
    assert out.startswith(
        f"own on some.txt\n{found.tokens:,} tokens, {found.words:,} words, {found.bytes:,} bytes; windows of 29"
    )
    shown = numbers(out)
    assert shown["by token"] == f"{found.by_token:,.2f}"
    assert shown["by word"] == evaluate.format_decimal(found.by_word)
    assert shown["by byte"] == f"{found.by_byte:,.2f}"
    assert shown["bits per byte"] == f"{found.bits_per_byte:.3f}"
    assert "published" not in out


def test_a_corpus_is_scored_with_its_ends_and_its_words(own, capsys, tmp_path):
    model = GPT2.load(own)
    corpus = prepare([TEXT, "the dog saw the mat"] * 3, model.text, tmp_path / "corpus")
    words = 3 * (len(TEXT.split()) + 5)
    found = perplexity(model, corpus, context=29, stride=14, batch=BATCH, words=words)
    code, out, _ = run_evaluate(capsys, own, tmp_path / "corpus")
    assert code == 0
    assert f"{corpus.tokens - 1:,} tokens, {words:,} words" in out
    assert numbers(out)["by word"] == evaluate.format_decimal(found.by_word)
    held_out = corpus.split(0.3)[1]
    out = run_evaluate(capsys, own, tmp_path / "corpus", "--held-out", 0.3)[1]
    assert numbers(out)["by token"] == f"{perplexity(model, held_out, context=29, stride=14, batch=BATCH).by_token:,.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "theirs"])
def test_passages_are_scored_by_their_last_words(kind, capsys, tmp_path, request):
    folder = request.getfixturevalue(kind)
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in PASSAGES))
    model = GPT2.load(folder)
    stop = stop_tokens(model.text.pieces(range(model.text.vocabulary)))
    found = lambada(model, PASSAGES, model.text.encode, context=29, stop=stop, batch=BATCH)
    capsys.readouterr()  # the bar of transformers, which has saved the folder
    code, out, err = run_evaluate(capsys, folder, tmp_path / "some.jsonl")
    assert (code, err) == (0, "")
    shown = numbers(out)
    assert f"3 passages, {found.tokens} tokens of last words." in out
    shown_perplexity = float(shown["perplexity"].replace(",", ""))
    assert math.log(shown_perplexity) == pytest.approx(math.log(found.by_word), abs=0.006 / found.by_word + 1e-4)  # 2 decimals
    assert shown["right, %"] == f"{100 * found.accuracy:.2f}"
    assert shown["filtered, %"] == f"{100 * found.accuracy_filtered:.2f}"
    assert "no stop word may begin the last word" in out


def test_wikitext_is_read_without_its_spacing_and_its_words_are_counted_with_it(own, capsys, tmp_path):
    (tmp_path / "wiki.txt").write_text(WIKI)
    model = GPT2.load(own)
    tokens = model.text.encode(wikitext.detokenize(WIKI))
    found = perplexity(model, tokens, context=29, stride=14, words=wikitext.count_words(WIKI), bytes=len(WIKI))
    out = run_evaluate(capsys, own, tmp_path / "wiki.txt", "--wikitext")[1]
    assert f"{found.tokens} tokens, {found.words} words, {found.bytes} bytes" in out
    assert numbers(out)["by word"] == evaluate.format_decimal(found.by_word)
    assert "WikiText's spacing is removed" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "missing.txt"], "missing.txt is neither a file nor a folder"),
        (["--context", "30"], "--context must be at most 29"),
        (["--stride", "30"], "stride must be at most context"),
        (["--device", "nowhere"], "--device nowhere cannot be used"),
        (["--held-out", "0.1"], "--held-out applies to a corpus"),
        (["--on", "bad.jsonl"], 'bad.jsonl:1 has no field "text"'),
        (["--on", "bad.txt"], "not UTF-8 text"),
        (["--on", "empty.txt"], "at least two tokens"),
        (["--on", "folder"], "folder is not a corpus"),
        (["--model", "bad.txt"], "bad.txt"),
        (["--model", "./folder/x"], "./folder/x is neither a folder nor a name on the hub"),
    ],
)
def test_what_cannot_be_scored_is_one_line_and_2(own, capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text(TEXT)
    Path("bad.txt").write_bytes(b"\xff")
    Path("bad.jsonl").write_text('{"words": "a b"}')
    Path("empty.txt").write_text("")
    Path("folder").mkdir()
    given = {"--model": str(own), "--on": "some.txt", **dict(zip(arguments[::2], arguments[1::2], strict=True))}
    code = main(["evaluate", *(part for pair in given.items() for part in pair)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("regard evaluate: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_corpus_of_other_tokens_is_refused(theirs, own, capsys, tmp_path):
    prepare([TEXT], GPT2.load(own).text, tmp_path / "corpus")
    code, _, err = run_evaluate(capsys, theirs, tmp_path / "corpus")
    assert code == 2
    assert "whose tokens are not those of theirs" in err
