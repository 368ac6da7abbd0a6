import json
import re

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from regard.errors import WeightsError
from regard.models import GPT2, GPT2Config
from regard.text import BytePair
from regard.weights import gpt2
from weights import checkpoint_formats
from weights.checkpoint_formats import CONTEXT, FORMATS, HEADS, LAYERS, WIDTH, WORDS

TIED = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "context": CONTEXT, "vocabulary": WORDS, "inner": 4 * WIDTH}


def ours(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """The tensors of a model of transformers, by the names of regard, read off its modules."""
    body, found = model.transformer, {}
    found |= {"tokens.weight": body.wte.weight, "positions.weight": body.wpe.weight}
    for n, block in enumerate(body.h):
        weights, biases = block.attn.c_attn.weight.T, block.attn.c_attn.bias
        for place, name in enumerate(("W_query", "W_key", "W_value")):
            rows = slice(place * WIDTH, (place + 1) * WIDTH)
            found[f"blocks.{n}.attention.{name}.weight"] = weights[rows]
            found[f"blocks.{n}.attention.{name}.bias"] = biases[rows]
        columns = {"attention.out_proj": block.attn.c_proj, "up": block.mlp.c_fc, "down": block.mlp.c_proj}
        for name, module in columns.items():
            found |= {f"blocks.{n}.{name}.weight": module.weight.T, f"blocks.{n}.{name}.bias": module.bias}
        for name, module in {"norm_attention": block.ln_1, "norm_feed": block.ln_2}.items():
            found |= {f"blocks.{n}.{name}.weight": module.weight, f"blocks.{n}.{name}.bias": module.bias}
    found |= {"norm.weight": body.ln_f.weight, "norm.bias": body.ln_f.bias}
    return {name: tensor.detach() for name, tensor in found.items()}


def assert_equal_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_tensors(tmp_path, kind):
    model = checkpoint_formats.make_small_gpt2()
    found = gpt2.load_weights(FORMATS[kind](model, tmp_path))
    assert_equal_tensors(found.tensors, ours(model))
    assert {name: found.config[name] for name in TIED} == TIED
    assert found.config["tied"]
    assert found.config["activation"] == "gelu_tanh"
    assert found.folder == tmp_path
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in found.tensors.values())


def test_the_lectures_queries_may_have_no_bias_and_their_head_may_be_its_own(tmp_path):
    model = checkpoint_formats.make_small_gpt2(tie_word_embeddings=False)
    path = checkpoint_formats.lectures(model, tmp_path) / "model.pth"
    state = {name: x for name, x in torch.load(path, weights_only=True).items() if not re.search(r"W_\w+\.bias", name)}
    torch.save(state, path)
    found = gpt2.load_weights(tmp_path).tensors
    assert torch.equal(found["head.weight"], model.lm_head.weight)
    assert not found["blocks.1.attention.W_key.bias"].any()
    del state["out_head.weight"]
    torch.save(state, path)
    with pytest.raises(WeightsError, match=r"has no out_head\.weight"):
        gpt2.load_weights(tmp_path)


@pytest.mark.parametrize("kind", ["transformers", "pickle", "TensorFlow", "npz"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tensors_come_in_the_dtype_that_is_asked_for(tmp_path, kind, dtype):
    model = checkpoint_formats.make_small_gpt2()
    found = gpt2.load_weights(FORMATS[kind](model, tmp_path), dtype).tensors
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_equal_tensors(found, ours(model))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_loaded_and_transformers_loads_it_too(tmp_path, tied):
    model = checkpoint_formats.make_small_gpt2(
        tie_word_embeddings=tied, activation_function="relu", n_inner=31, layer_norm_epsilon=1e-3
    )
    first = gpt2.load_weights(checkpoint_formats.folder(model, tmp_path / "theirs"))
    gpt2.save_weights(tmp_path / "ours", first.config, first.tensors)
    again = gpt2.load_weights(tmp_path / "ours")
    assert_equal_tensors(again.tensors, first.tensors)
    assert again.config == first.config
    theirs, missed = GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(missed.values())
    tokens = torch.arange(13)[None]
    assert torch.equal(theirs.eval()(tokens).logits, model(tokens).logits)
    with safe_open(tmp_path / "ours" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # which earlier releases of transformers ask for
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["config.json", "model.safetensors"]


def test_a_save_that_fails_leaves_the_former_model(tmp_path, monkeypatch):
    found = gpt2.load_weights(checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path / "theirs"))
    gpt2.save_weights(tmp_path / "model", found.config, found.tensors)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert sorted(before) == ["config.json", "model.safetensors"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.atomic_write.os.fsync", full)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in found.tensors.items()}
    with pytest.raises(WeightsError, match="No space left"):
        gpt2.save_weights(tmp_path / "model", found.config, zeros)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before


def test_tensors_that_are_no_gpt2_are_not_saved(tmp_path):
    found = gpt2.load_weights(checkpoint_formats.folder(checkpoint_formats.make_small_gpt2(), tmp_path / "theirs"))
    for change, sentence in (
        ({"norm.bias": torch.ones(3)}, r"norm\.bias must have the shape \(15,\), got \(3,\)"),
        ({"other": torch.ones(3)}, "other is not part"),
    ):
        with pytest.raises(WeightsError, match=sentence):
            gpt2.save_weights(tmp_path / "model", found.config, found.tensors | change)
    with pytest.raises(WeightsError, match=r"norm\.bias must have the shape \(15,\), got nothing"):
        gpt2.save_weights(tmp_path / "model", found.config, {n: x for n, x in found.tensors.items() if n != "norm.bias"})
    assert not (tmp_path / "model").exists()


def save_ours(folder):
    GPT2(GPT2Config(layers=1, heads=1, width=4, context=5, vocabulary=7)).save(folder)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", None, False),
        ("vocab.json", None, False),
        ("encoder.json", None, True),
        ("tokenizer_config.json", None, False),
        ("config.json", {"model_type": "llama"}, False),
        ("config.json", {"model_type": "gpt2"}, True),
        ("config.json", {}, True),
        ("config.json", [], True),
        ("model.gguf", None, True),
    ],
)
def test_a_folder_is_our_own_unless_its_config_or_its_tokenizer_is_of_another_kind(tmp_path, name, content, expected):
    assert gpt2.is_own_gpt2(str(tmp_path))
    save_ours(tmp_path)
    assert gpt2.is_own_gpt2(str(tmp_path))
    (tmp_path / name).write_text(json.dumps(content))
    assert gpt2.is_own_gpt2(str(tmp_path)) == expected


def test_a_file_is_our_own_unless_it_is_a_gguf_file(tmp_path):
    for name in ("ckpt.pt", "model.gguf"):
        (tmp_path / name).touch()
    assert gpt2.is_own_gpt2(str(tmp_path / "ckpt.pt"))
    assert not gpt2.is_own_gpt2(str(tmp_path / "model.gguf"))
    assert not gpt2.is_own_gpt2(str(tmp_path / "nothing"))


TEXTS = ["the cat sat on it's mat", "  two  spaces\n\n\nand\tmore\r\n", "👍🏽 שלום e\u0301 \u200b\u2028x", "1234 I'VE we'll"]


@pytest.mark.parametrize("special", [("<|endoftext|>",), (), ("<|pad|>", "<|endoftext|>")])
def test_transformers_reads_the_text_and_its_end_from_the_folder_that_is_saved(tmp_path, special):
    text = BytePair.train(["the cat sat on it's mat, and the cat sat 12 times\n" * 9], 300, special)
    model = GPT2(GPT2Config(layers=1, heads=1, width=4, context=5, vocabulary=text.vocabulary))
    model.text = text
    model.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for one in TEXTS:
        assert theirs(one)["input_ids"] == text.encode(one)
    config = GPT2LMHeadModel.from_pretrained(tmp_path).generation_config
    assert config.eos_token_id == text.special.get("<|endoftext|>")
    assert gpt2.is_own_gpt2(str(tmp_path))
    assert GPT2.load(tmp_path).text.encode(TEXTS[0]) == text.encode(TEXTS[0])
