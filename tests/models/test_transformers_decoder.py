"""A model of transformers continues texts as it does by itself, and in one compiled call where nobody observes it."""

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import transformers
from torch import nn

import regard
from bounds import DRAWS, EXPONENTIAL, assert_within, estimate_rounding, is_stable_under_rounding
from generate.small_models import has_bfloat16_cache, rows, shift_cached_numbers, shift_numbers
from regard.compiled import threads
from regard.errors import ConfigError
from regard.generate import quantise
from regard.generate.kv_cache import Cache
from regard.matmul import QuantizedLinear
from regard.models import TransformersDecoder

compiled = pytest.mark.skipif(
    not (threads.can_run_loops() and threads.find_barrier_address()),
    reason="this torch has no OpenMP to call, or numba is not installed",
)
SIZES = {"vocab_size": 211, "hidden_size": 264, "intermediate_size": 331, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "Llama": {},
    "Llama with biases and as many key heads": {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    "Llama with wide heads, tied": {"head_dim": 80, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "Llama with scaled rotation": {"rope_parameters": LLAMA3},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
}
LENGTHS = (9, 5, 1)


def make_model(name: str = "Llama", **changes) -> nn.Module:
    """A random model, its weights so large that its logits are decided, its biases and norms not those of a new model."""
    family = name.split(" ", maxsplit=1)[0]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **VARIANTS.get(name, {}), **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@cache
def make_decoder(name: str = "Llama", to: str = "float32") -> TransformersDecoder:
    model = make_model(name)
    return TransformersDecoder(model if to == "float32" else quantise(model, to))


def restore(decoder: TransformersDecoder) -> TransformersDecoder:
    """The same numbers in float64, in layers that are not quantised."""
    other = copy.deepcopy(decoder)
    for module in list(other.modules()):
        for name, part in module.named_children():
            if isinstance(part, QuantizedLinear):
                weight = part.dequantize_rows(torch.arange(len(part.values)))
                plain = nn.Linear(weight.shape[1], weight.shape[0], bias=part.bias is not None)
                plain.weight = nn.Parameter(weight)
                plain.bias = None if part.bias is None else nn.Parameter(part.bias)
                setattr(module, name, plain)
    return other.double()


@torch.no_grad()
def find_bound(decoder: TransformersDecoder, run, is_quantized: bool = False) -> float:
    """How far two computations of run(decoder) may lie apart in float32, and where vectors or its cache have 16 bits."""
    exact = restore(decoder)
    bound, expected = estimate_rounding(exact, run, SIZES["intermediate_size"] + EXPONENTIAL), run(exact)
    rounds_cache = has_bfloat16_cache([layer.self_attn.k_proj for layer in decoder.model.model.layers])
    for seed in range(DRAWS if is_quantized or rounds_cache else 0):
        shifted = [one for one in exact.modules() if isinstance(one, nn.Linear) and is_quantized]
        with shift_numbers(shifted, [], seed), shift_cached_numbers(seed) if rounds_cache else nullcontext():
            bound = max(bound, 2 * float((run(exact) - expected).abs().max()))
    return bound


@torch.no_grad()
def read_prompts(decoder: TransformersDecoder, *lengths: int, room: int = 24) -> Cache:
    """What a decoder keeps of random prompts of these lengths."""
    prompts, kept = rows(*lengths, vocabulary=SIZES["vocab_size"]), Cache(decoder.config.layers, room)
    decoder(torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in prompts]), kept)
    kept.crop(torch.tensor(lengths))
    return kept


def read_more(decoder: TransformersDecoder, read=None) -> torch.Tensor:
    """The logits of two more tokens after each prompt, and the keys and values of all, in one tensor."""
    kept, new = read_prompts(decoder, *LENGTHS[:1]), torch.tensor([[3, 7]])
    with torch.no_grad():
        logits = (read or decoder)(new, kept)
    stop = LENGTHS[0] + 2
    return torch.cat([logits.flatten(), *[x[:, :, :stop].flatten() for layer in kept.keys_and_values for x in layer]])


@compiled
@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("to", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_compiled_call_computes_what_the_model_computes(name, to):
    decoder = make_decoder(name, to)
    reading = decoder.reading()
    with torch.no_grad():
        assert reading.can_run(torch.tensor([[3, 7]]), read_prompts(decoder, *LENGTHS[:1]))
    bound = find_bound(decoder, read_more, to in ("int8", "int4"))
    assert_within(read_more(decoder, reading), read_more(decoder), bound)


@pytest.mark.slow
@pytest.mark.emulated
@compiled
@pytest.mark.parametrize("wanted", [None, 1])
def test_texts_of_unequal_length_are_read_side_by_side(wanted):
    decoder = make_decoder()
    ours, theirs, new = read_prompts(decoder, *LENGTHS), read_prompts(decoder, *LENGTHS), torch.tensor([[1], [2], [3]])
    ours.wanted = theirs.wanted = wanted
    with torch.no_grad():
        assert decoder.reading().can_run(new, ours)
        found, expected = decoder.reading()(new, ours), decoder(new, theirs)
    assert_within(found, expected, find_bound(decoder, lambda one: one(new, read_prompts(one, *LENGTHS))))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_with_a_cache_it_computes_what_the_model_computes_for_each_text_alone(attention):
    decoder = TransformersDecoder(make_model(attn_implementation=attention))
    kept, prompts = read_prompts(decoder, *LENGTHS), rows(*LENGTHS, vocabulary=SIZES["vocab_size"])
    bound = find_bound(decoder, lambda one: one(torch.tensor([prompts[0]])))
    with torch.no_grad():
        found = decoder(torch.tensor([[5]] * len(LENGTHS)), kept)
        for row, prompt in zip(found, prompts, strict=True):
            assert_within(row[-1], decoder.model(torch.tensor([[*prompt, 5]])).logits[0, -1], bound)


def generate_tokens(decoder: TransformersDecoder, count: int = 10) -> list[int]:
    return [int(one) for one in regard.generate.generate(decoder, torch.tensor([[5, 9, 2, 44]]), count, temperature=0)]


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_it_generates_the_tokens_of_transformers(name):
    decoder = make_decoder(name)
    assert is_stable_under_rounding(restore(decoder), generate_tokens, SIZES["intermediate_size"] + EXPONENTIAL)
    expected = decoder.model.generate(torch.tensor([[5, 9, 2, 44]]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert generate_tokens(decoder) == expected[0, 4:].tolist()


def replace_activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def add_hook(model):
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)


def change_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def change_scale(model):
    model.model.layers[1].self_attn.scaling = 0.3


def replace_forward(model):
    model.model.layers[0].mlp.forward = lambda x: x


def convert(model):
    model.bfloat16()


@compiled
@pytest.mark.parametrize("change", [replace_activation, add_hook, change_epsilon, change_scale, replace_forward, convert])
def test_a_changed_model_is_not_run_compiled(change):
    model = make_model()
    decoder, new = TransformersDecoder(model), torch.tensor([[1]])
    with torch.no_grad():
        assert decoder.reading().can_run(new, read_prompts(decoder, 3))
        change(model)
        assert not decoder.reading().can_run(new, read_prompts(decoder, 3))


def test_what_it_generates_can_be_recorded():
    decoder = make_decoder()
    with regard.record(decoder.model) as recording:
        tokens = generate_tokens(decoder)
    assert recording.missed == []
    whole = [5, 9, 2, 44, *tokens][:-1]
    with regard.record(decoder.model) as expected, torch.no_grad():
        decoder.model(torch.tensor([whole]))
    for layer in range(2):
        ours, theirs = recording.map(layer).dense(), expected.map(layer).dense()
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT2", "Gemma2", "Mistral with a window"])
def test_other_models_are_refused_with_the_names_of_those_it_takes(name):
    sizes = {"sliding_window": 8} if name.startswith("Mistral") else {"head_dim": 44} if name == "Gemma2" else {}
    if name == "GPT2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=20, bos_token_id=None, eos_token_id=None)
        model = transformers.GPT2LMHeadModel(config)
    else:
        family = name.split(" ", maxsplit=1)[0]
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, without a sliding window; got"
    ):
        TransformersDecoder(model)
