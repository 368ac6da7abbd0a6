import json
from types import SimpleNamespace

import pytest
import tokenizers
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from regard.cli.model_loading import BASE_MODEL, CAUSAL_LM, TransformersModel, load_model
from regard.errors import DataError
from regard.models import GPT2
from regard.models import GPT2Config as Sizes
from regard.models.gpt2_adapter import GPT2Adapter
from regard.text.byte_pair import GPT2_FOLDER


@pytest.fixture
def folder(tmp_path):
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=29)).save_pretrained(tmp_path)
    GPT2TokenizerFast(vocab=str(GPT2_FOLDER / "encoder.json"), merges=str(GPT2_FOLDER / "vocab.bpe")).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_our_own_and_one_of_transformers_are_told_apart(folder, tmp_path):
    GPT2(Sizes(layers=1, heads=1, width=4, context=5, vocabulary=7)).save(tmp_path / "ours")
    assert isinstance(load_model(str(tmp_path / "ours")), GPT2Adapter)
    assert isinstance(load_model(str(folder)), TransformersModel)


def test_a_folder_without_a_tokenizer_is_refused_with_what_it_has(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(DataError) as error:
        load_model(str(tmp_path))
    (line,) = str(error.value).splitlines()
    assert "has a model and no tokenizer: expected tokenizer.json, tokenizer.model, vocab.json, vocab.txt or the like" in line
    assert "the folder has config.json, " in line
    assert line.endswith(f"AutoTokenizer.from_pretrained(...).save_pretrained({str(tmp_path)!r}).")


@pytest.mark.parametrize(("ends", "expected"), [(5, [5]), (999, []), ([5, 999, 3], [5, 3]), (None, [11])])
def test_a_text_ends_at_the_tokens_of_the_config_that_the_model_has(ends, expected):
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=17), generation_config=SimpleNamespace(eos_token_id=ends))
    assert TransformersModel("", model, SimpleNamespace(eos_token_id=11)).list_ends() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BASE_MODEL, CAUSAL_LM])
def test_a_tensor_that_is_missing_is_not_drawn_at_random(folder, kind):
    load_model(str(folder), kind)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.ln_2.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"has no (transformer\.)?h\.1\.ln_2\.weight, which transformers would draw at random"):
        load_model(str(folder), kind)


@pytest.mark.parametrize(
    "change", [{"n_layer": "two"}, {"n_head": 0}, {"activation_function": []}, {"n_embd": {}}, {"n_layer": None}]
)
def test_a_config_that_transformers_cannot_read_is_refused_in_a_sentence(folder, change):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match="could not be loaded"):
        load_model(str(folder))


def make_tokenizer(decoder: str) -> PreTrainedTokenizerFast:
    """A vocabulary of SentencePiece, as Llama 2 and T5 have it, with a token that begins every text."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    steps = tokenizers.decoders
    parts = [steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    words.decoder = steps.Sequence(parts) if decoder == "llama" else steps.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = ["the cat sat on the  mat,\nand the dog sat, too."] * 9
    words.train_from_iterator(text, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special))
    words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("decoder", ["llama", "t5"])
def test_the_words_of_a_text_keep_the_spaces_between_them(decoder):
    model = TransformersModel("", SimpleNamespace(config=SimpleNamespace()), make_tokenizer(decoder))
    text = "the cat sat on the  mat, too"
    ids, words, whole = model.tokens(text, None)
    assert (words[0], "".join(words[1:])) == ("<s>", " " + text)  # SentencePiece puts a space before the first word
    assert [model.decode([number]) for number in ids[0].tolist()] == words == [model.pieces()[number] for number in ids[0]]
    assert model.decode(ids[0, 3:].tolist()) == "".join(words[3:])
    again, *_ = model.tokens("".join(words), None)  # as the page reads a story again
    assert (again.tolist(), whole) == (ids.tolist(), len(words))
