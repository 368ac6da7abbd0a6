import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import regard
from bounds import assert_within, estimate_rounding
from generate.small_models import gpt2, hugging_face, restore, rounding_bound, rows, stack_tokens, tokens_are_decided
from models.translators import make_translator
from regard import ConfigError
from regard.generate import quantise
from regard.generate.kv_cache import Cache
from regard.matmul import QuantizedLinear
from regard.matmul.quantized_linear import WEIGHTS
from regard.models.vision_transformer import VisionConfig, VisionTransformer
from skips import NEEDS_BFLOAT16

MODEL = gpt2(dtype=torch.float32, layers=3, heads=2, width=64, vocabulary=101, context=64)
SMALL = quantise(MODEL)


@torch.no_grad()
@pytest.mark.parametrize(("to", "off"), [("bfloat16", 0.03), ("float16", 0.004), ("int8", 0.1), ("int4", 2)])
def test_it_computes_what_the_model_of_its_numbers_computes(to, off):
    tokens, small = torch.tensor(rows(17, 17, vocabulary=101)), quantise(MODEL, to)
    assert_within(small(tokens), restore(small)(tokens), rounding_bound(small, lambda one: one(tokens)))
    assert 0 < (small(tokens) - MODEL(tokens)).abs().max() < off * MODEL(tokens).std()


@torch.no_grad()
@pytest.mark.parametrize("to", ["bfloat16", "float16"])
def test_halves_are_nearer_than_transformers_in_the_same_dtype(to):
    """It rounds each vector too; here their numbers stay float32."""
    tokens = torch.tensor(rows(17, 17, vocabulary=101))
    exact = restore(MODEL)(tokens)
    theirs = hugging_face(MODEL).to(WEIGHTS[to])(tokens).logits.double()
    assert (quantise(MODEL, to)(tokens) - exact).abs().max() < (theirs - exact).abs().max()


@pytest.mark.slow
@torch.no_grad()
@NEEDS_BFLOAT16
@pytest.mark.parametrize("to", ["bfloat16", "int8", "int4"])
def test_a_long_prompt_is_nearer_than_a_model_in_bfloat16(to):
    model = quantise(gpt2(dtype=torch.float32, layers=3, heads=2, width=256, vocabulary=101, context=211), to)
    tokens, cache, exact = torch.tensor(rows(193, vocabulary=101)), Cache(3, 211), restore(model)
    expected = exact(tokens)
    limit = (exact.bfloat16()(tokens).double() - expected).square().mean()
    whole = model(tokens)
    inside = model.blocks[0].attention(model.blocks[0].norm_attention(model.tokens(tokens)).bfloat16())
    assert inside.dtype == torch.bfloat16
    assert 0 < (whole - expected).square().mean() < limit
    parts = torch.cat([model(part, cache) for part in tokens.split(149, 1)], 1)  # the rest is read in float32
    assert 0 < (parts - expected).square().mean() < limit


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("to", "narrow"), [("bfloat16", torch.bfloat16), ("int8", torch.bfloat16), ("int4", torch.bfloat16), ("float16", None)]
)
def test_keys_and_values_of_float32_are_cached_in_bfloat16_if_weights_round_by_as_much(to, narrow, dtype):
    model, cache = quantise(gpt2(dtype=dtype, layers=3, heads=2, width=64, vocabulary=101, context=64), to), Cache(3, 20)
    tokens = torch.tensor(rows(17, vocabulary=101))
    assert model(tokens, cache).dtype == dtype
    stored = narrow if narrow is not None and dtype == torch.float32 else dtype
    assert cache.dtype == stored
    assert {x.dtype for layer in cache.keys_and_values for x in layer} == {stored}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "seeds"), [("bfloat16", (0, 15)), ("float16", (0, 0)), ("int8", (0, 68)), ("int4", (0, 36))], ids=WEIGHTS
)
def test_it_generates_with_a_cache_in_batches_and_by_beams(to, seeds):
    small, batches = quantise(MODEL, to), ([5], [3, 9, 4])
    exact = restore(small)
    for settings in ({"temperature": 0}, {"seed": 3}, {"beams": 3}):
        for prompts in (rows(*one, vocabulary=101, seed=seed) for one, seed in zip(batches, seeds, strict=True)):
            asked = {**settings, "seed": list(range(len(prompts)))} if "seed" in settings else settings

            def tokens(model, prompts=prompts, asked=asked):
                return stack_tokens(model.generate(prompts, 8, **asked))

            assert tokens_are_decided(small, tokens)
            assert torch.equal(tokens(small), tokens(exact))


def test_it_is_recorded_and_changed_like_the_model():
    tokens = torch.tensor(rows(11, vocabulary=101))
    with torch.no_grad(), regard.record(SMALL) as recording:
        inside = SMALL(tokens)
    assert torch.equal(inside, SMALL(tokens))
    assert not recording.missed
    assert [call.name for call in recording.calls] == [f"blocks.{n}.attention" for n in range(3)]
    with torch.no_grad(), regard.intervene(SMALL, regard.KnockOut(1, 0)):
        assert not torch.equal(SMALL(tokens), inside)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: quantise(MODEL, "int3"), "'int8', 'int4'; got 'int3'"),
        (lambda: quantise(SMALL), "quantized already"),
    ],
)
def test_what_cannot_be_rounded_is_said(ask, says):
    with pytest.raises(ConfigError, match=says):
        ask()


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double_first(layer):
    layer.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    return layer


def double_by_forward(layer):
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


@torch.no_grad()
@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize(
    "make", [Doubled, lambda *size: double_first(nn.Linear(*size)), lambda *size: double_by_forward(nn.Linear(*size))]
)
def test_a_layer_that_computes_something_else_stays_as_it_is_and_is_named(make, to):
    model, x = nn.Sequential(nn.Linear(7, 5), make(5, 11)), torch.randn(3, 7)
    with pytest.warns(UserWarning, match=r"not quantized: 1 \(\w+ of Sequential\)"):
        small = quantise(model, to)
    assert isinstance(small[0], QuantizedLinear)
    assert torch.equal(small(x), model[1](small[0](x)))
    with pytest.raises(ConfigError, match=r"no linear layer of Sequential can be quantized, not 0 \("):
        quantise(nn.Sequential(make(5, 11)), to)


@torch.no_grad()
@pytest.mark.parametrize(
    "attention",
    [nn.TransformerEncoderLayer(32, 4, 61, batch_first=True), nn.TransformerDecoderLayer(32, 4, 61, batch_first=True)],
)
def test_a_module_of_torch_that_reads_its_weights_keeps_them(attention):
    model, x = nn.ModuleList([attention, nn.Linear(32, 5)]).eval(), torch.randn(2, 3, 32)
    arguments = [x] if isinstance(attention, nn.TransformerEncoderLayer) else [x, x]
    with pytest.warns(UserWarning, match=r"self_attn\.out_proj"):
        small = quantise(model)
    assert isinstance(small[1], QuantizedLinear)
    assert (small[0](*arguments) - attention(*arguments)).abs().max() < 0.05
    with pytest.raises(ConfigError, match="no linear layer of MultiheadAttention can be quantized, not out_proj"):
        quantise(nn.MultiheadAttention(32, 4))


def make_weight_reader(name):
    """A small model of transformers whose code reads the weights of its linear layers, and tokens for it."""
    torch.manual_seed(0)
    sizes = {"T5": {"d_model": 34, "d_kv": 6, "d_ff": 52, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}}
    sizes |= {"Mamba": {"hidden_size": 34, "state_size": 7, "num_hidden_layers": 2}}
    kind = {"T5": transformers.T5ForConditionalGeneration, "Mamba": transformers.MambaForCausalLM}[name]
    model = kind(getattr(transformers, f"{name}Config")(vocab_size=31, **sizes[name])).eval()
    tokens = torch.randint(0, 31, (2, 7))
    return model, {"input_ids": tokens} | ({"decoder_input_ids": tokens[:, :5]} if name == "T5" else {})


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["T5", "Mamba"])
def test_a_model_that_reads_the_weights_of_its_layers_computes_with_those_that_are_left(name, to, dtype):
    model, given = make_weight_reader(name)
    small = quantise(model.to(dtype), to)
    exact = copy.deepcopy(model).double()
    for path, layer in small.named_modules():
        if isinstance(layer, QuantizedLinear):
            exact.get_submodule(path).weight = nn.Parameter(layer.weight.double())  # an embedding may share the former
    logits = small(**given).logits
    assert logits.dtype == model(**given).logits.dtype
    allowed = estimate_rounding(exact, lambda one: one(**given).logits, 52, dtype)
    assert_within(logits, exact(**given).logits, allowed)


SAVABLE = (
    MODEL,
    make_translator("transformer"),
    make_translator("additive"),
    VisionTransformer(VisionConfig(15, 3, 2, 2, 3, 12, 7)),
)


@pytest.mark.parametrize("model", SAVABLE, ids=lambda model: type(model).__name__)
def test_a_quantized_model_is_not_saved_over_the_model_that_it_was_made_from(tmp_path, model):
    model.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="cannot be saved: save the model that it was made from"):
        quantise(model).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


PEAK = """
import sys, torch
from benchmarks.timing import measure_peak_megabytes
from regard.generate import quantise
from regard.generate.kv_cache import Cache
from regard.models import GPT2, GPT2Config
torch.manual_seed(0)
sizes = GPT2Config.small()
model = GPT2(sizes).eval()
model = model if sys.argv[1] == "float32" else quantise(model, sys.argv[1])
weights = sum({x.data_ptr(): x.nbytes for x in (*model.parameters(), *model.buffers())}.values())
cache = 2 * 4 * sizes.layers * sizes.width * 48
run = lambda length: list(model.generate(list(range(length)), 32, temperature=0))
run(3)  # what is set up at a first call
peak = measure_peak_megabytes(lambda: run(16))
print(-1 if peak is None else (peak * 2**20 + weights) / (weights + cache))
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", *WEIGHTS])
def test_generating_takes_the_memory_of_the_weights_and_the_cache(weights):
    command = [sys.executable, "-c", PEAK, weights]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    peak = float(ran.stdout)
    if peak < 0:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert peak <= 1.2
