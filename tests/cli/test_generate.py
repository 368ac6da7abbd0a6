import io
import itertools
import json
import re
import shutil

import pytest
import tokenizers
import torch
import transformers

import regard.cli.generate
from generate.small_models import gpt2
from regard import record
from regard.cli import main
from regard.cli.generate import load_decoder
from regard.cli.model_loading import CAUSAL_LM, load_model
from regard.generate import choices, generate
from regard.models import GPT2
from regard.show.page.session import GenerationRequest, Session
from regard.text import BytePair
from regard.text.byte_pair import GPT2_FOLDER
from regard.text.transformers_tokenizer import TransformersTokenizer

pytestmark = pytest.mark.usefixtures("screen_of_80_columns")
SAMPLE = "the cat sat on the mat, and the dog saw the cat again and again. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model with its vocabulary beside it."""
    text = BytePair.train([SAMPLE], 277)
    model = gpt2(vocabulary=text.vocabulary, width=32, heads=4, layers=4, context=47, loud=3.0, dtype=torch.float32)
    model.text = text
    path = tmp_path_factory.mktemp("model") / "small"
    model.save(path)
    return str(path)


def run_generate(capsys, *arguments):
    code = main(["generate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_is_written_is_what_the_model_completes(folder, capsys):
    model = GPT2.load(folder)
    asked = {"temperature": 0.7, "top_k": 50, "seed": 3}
    expected = "".join(model.complete("the cat", 20, **asked))
    flags = ["--temperature", "0.7", "--top-k", "50", "--seed", "3", "--tokens", "20"]
    code, out, err = run_generate(capsys, "the cat", "--model", folder, *flags)
    assert (code, err) == (0, "")
    printable = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in expected)
    assert out == printable + "\n"


@pytest.mark.slow
def test_the_words_come_from_a_file_or_from_standard_input_too(folder, capsys, tmp_path, monkeypatch):
    expected = run_generate(capsys, "the cat", "--model", folder, "--seed", "3")
    (tmp_path / "prompt.txt").write_text("the cat")
    assert run_generate(capsys, str(tmp_path / "prompt.txt"), "--model", folder, "--seed", "3") == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    assert run_generate(capsys, "-", "--model", folder, "--seed", "3") == expected


def test_what_a_model_writes_does_not_steer_the_terminal(capsys):
    regard.cli.generate.print_stream(iter(["a\x1b[2Jb", "\n\tc\x07"]))
    assert capsys.readouterr().out == "a\\x1b[2Jb\n\tc\\x07\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--look", "--top", "2"]])
def test_ctrl_c_ends_it_with_the_line(folder, capsys, monkeypatch, flags):
    def write_two_then_interrupt(*args, **settings):
        yield from itertools.islice(write(*args, **settings), 2)
        raise KeyboardInterrupt

    name = "choices" if flags else "complete"
    write = getattr(regard.cli.generate, name)
    monkeypatch.setattr(regard.cli.generate, name, write_two_then_interrupt)
    code, out, err = run_generate(capsys, "the cat", "--model", folder, "--temperature", "0", *flags)
    assert (code, err) == (130, "")
    assert out.endswith("\n")
    assert len(out) > 1


def test_the_likeliest_tokens_stand_under_each(folder, capsys):
    model = GPT2.load(folder)
    steps = list(choices(model, model.text.encode("the cat"), 3, seed=3))
    code, out, _ = run_generate(capsys, "the cat", "--model", folder, "--seed", "3", "--tokens", "3", "--top", "4")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 6
    for line, under, step in zip(lines[::2], lines[1::2], steps, strict=True):
        tokens, values = step.top(4)
        assert line.endswith(f"  {float(step.log_probabilities.exp()):.2f}")
        assert re.findall(r"\d\.\d\d(?= ')", under) == [f"{value:.2f}" for value in values[0].exp().tolist()]
        for piece in model.text.pieces(tokens[0]):
            assert f"'{piece}'" in under


def test_what_each_token_looked_at_is_the_mean_over_the_heads_of_the_last_layers(folder, capsys):
    model = GPT2.load(folder)
    prompt = model.text.encode("the cat sat on the mat")
    new = [int(token) for token in model.generate(prompt, 3, temperature=0)]
    with record(model) as recording, torch.no_grad():
        model(torch.tensor([prompt + new[:-1]]))
    weights = recording.map(3).dense()[0].mean(0)  # of 4 layers the last
    words = model.text.pieces(prompt + new)
    flags = ["--temperature", "0", "--tokens", "3", "--look"]
    code, out, _ = run_generate(capsys, "the cat sat on the mat", "--model", folder, *flags)
    story = model.text.bytes(new).decode(errors="replace") + "\n\n"  # the prose comes first
    assert out.startswith(story)
    first, second, *lines = out.removeprefix(story).splitlines()
    assert code == 0
    assert first == "looked at: the mean weight over 4 heads of layer 3"
    assert second == "beside each token: its probability"
    for n, line in enumerate(lines[1::2]):
        best = weights[len(prompt) - 1 + n].topk(4)
        places = best.indices.tolist()
        alike = [words[at].strip() for at in places]
        twins = [f" at {at}" if alike.count(words[at].strip()) > 1 else "" for at in places]  # told apart by their places
        shown = [
            f"{value:.2f} '{words[at]}'{twin}" for value, at, twin in zip(best.values.tolist(), places, twins, strict=True)
        ]
        assert "".join(line.split()) == "".join(("looked at " + "  ".join(shown)).split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["the cat", "--tokens", "99"], "the model reads at most 47"),
        (["the cat", "--top-p", "2"], "top_p is a probability"),
        (["the cat", "--top", "-1"], "--top must be at least 0"),
        (["the cat", "--tokens", "99"], "or set past to slide, to continue"),
        (["the cat", "--tokens", "-1"], "--tokens must be at least 0, got -1."),
        (["the cat", "--beams", "2", "--top", "3"], "a beam search chooses sequences, not tokens: leave out --beams"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(folder, capsys, arguments, says):
    code, out, err = run_generate(capsys, *arguments, "--model", folder)
    assert code == 2
    assert err.startswith("regard generate: ")
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


def test_the_model_in_the_box_sorts(capsys):
    assert main(["generate", "CBABBC", "--model", "sorter"]) == 0
    assert capsys.readouterr().out == "ABBBCC\n"
    assert main(["generate", "CAT", "--model", "sorter"]) == 2
    assert "'T' is not a letter of this model" in capsys.readouterr().err


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of a small Llama of transformers, with a vocabulary of bytes."""
    tokenizer = transformers.GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50257, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    model, path = transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("model") / "llama"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_model_of_transformers_writes_what_its_own_method_writes(llama, capsys):
    """The tokenizer has 256 pieces of one byte each, so that characters of several tokens stay whole."""
    code, out, err = run_generate(capsys, SAMPLE[:60] + " ☃", "--model", llama, "--tokens", "12", "--temperature", "0")
    model, words = transformers.LlamaForCausalLM.from_pretrained(llama), transformers.AutoTokenizer.from_pretrained(llama)
    ids = torch.tensor([words.encode(SAMPLE[:60] + " ☃")])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert (code, err) == (0, "")
    assert out == words.decode(expected) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["the generation config", "the tokenizer"])
def test_a_text_ends_on_the_page_and_in_the_terminal_at_the_same_tokens(llama, tmp_path, capsys, where):
    """At any of the generation config's, which then are not the tokenizer's; without them, at the tokenizer's."""
    words = transformers.AutoTokenizer.from_pretrained(llama)
    decoder, prompt = load_decoder(llama, None)[0], "the cat sat"
    tokens = [int(one) for one in generate(decoder, [words.encode(prompt)], 7, seed=3)]
    assert len(set(tokens)) == 7
    shutil.copytree(llama, tmp_path / "llama")
    config = {"eos_token_id": [50_000, tokens[4]]} if where == "the generation config" else {}
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "llama" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": None, **config}))
    words.eos_token = words.convert_ids_to_tokens(tokens[2 if config else 4])
    words.save_pretrained(tmp_path / "llama")
    code, out, _ = run_generate(capsys, prompt, "--model", str(tmp_path / "llama"), "--seed", "3", "--tokens", "7")
    assert (code, out) == (0, TransformersTokenizer(words).bytes(tokens[:4]).decode(errors="replace") + "\n")
    adapter = load_model(str(tmp_path / "llama"), CAUSAL_LM)
    *lines, _ = Session(None, adapter).generate_text(GenerationRequest(prompt, 7, 1.0, seed=3), lambda: None)
    lines = [one for one in lines if "token" in one]  # without that its loops are compiled
    assert [one["token"] for one in lines] == tokens[:5]  # with the token that ends it


@pytest.mark.slow
@pytest.mark.parametrize("template", ["\u0120the $A", "\u0120the $A <|endoftext|>", "$A"])
@pytest.mark.parametrize("prompt", ["the cat sat", ""])
def test_a_prompt_begins_on_the_page_and_in_the_terminal_as_the_tokenizer_begins_a_text(
    llama, tmp_path, capsys, template, prompt
):
    """With the token of its beginning, once; an empty text with that, too. What ends a text does not follow."""
    words = transformers.AutoTokenizer.from_pretrained(llama)
    words.bos_token = "\u0120the"
    numbers = [(one, words.convert_tokens_to_ids(one)) for one in ("\u0120the", "<|endoftext|>")]
    words.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=numbers)
    shutil.copytree(llama, tmp_path / "llama")
    words.save_pretrained(tmp_path / "llama")
    given = [words.bos_token_id] * (not template.startswith("$") or not prompt) + BytePair.gpt2().encode(prompt)
    decoder = load_decoder(llama, None)[0]
    tokens = [int(one) for one in generate(decoder, [given], 3, temperature=0)]
    code, out, _ = run_generate(
        capsys, prompt, "--model", str(tmp_path / "llama"), "--tokens", "3", "--temperature", "0", "--top", "1"
    )
    assert code == 0
    assert re.findall(r"^'(.*)'", out, re.MULTILINE) == [one.replace("\n", "\\n") for one in BytePair.gpt2().pieces(tokens)]
    adapter = load_model(str(tmp_path / "llama"), CAUSAL_LM)
    *lines, _ = Session(None, adapter).generate_text(GenerationRequest(prompt, 3, 0.0), lambda: None)
    assert [one["token"] for one in lines if "token" in one] == tokens
    assert next(one["place"] for one in lines if "token" in one) == len(given)


@pytest.mark.slow
def test_a_gpt2_of_transformers_has_the_words_of_its_own_tokenizer(tmp_path, capsys):
    """Of the size of GPT-2's, but with letters that are numbered in another order."""
    numbers = json.loads((GPT2_FOLDER / "encoder.json").read_text())
    exchanged = {"a": numbers["b"], "b": numbers["a"]}
    (tmp_path / "numbers.json").write_text(json.dumps({**numbers, **exchanged}))
    tokenizer = transformers.GPT2TokenizerFast(vocab=str(tmp_path / "numbers.json"), merges=str(GPT2_FOLDER / "vocab.bpe"))
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=29, initializer_range=0.3)
    )
    model.eval().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # transformers shows how far it is
    code, out, err = run_generate(capsys, "a b a b", "--model", str(tmp_path / "model"), "--tokens", "9", "--temperature", "0")
    ids = torch.tensor([tokenizer.encode("a b a b")])
    assert ids[0, 0] == numbers["b"]
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert (code, out, err) == (0, tokenizer.decode(expected) + "\n", "")


def test_a_model_of_another_family_is_refused_with_those_that_fit(capsys, tmp_path):
    config = transformers.Gemma2Config(
        vocab_size=50257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    transformers.GPT2TokenizerFast(
        vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")
    ).save_pretrained(tmp_path)
    code, out, err = run_generate(capsys, "the cat", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM" in err
