import pytest
import torch

import regard
from attribution.small_models import C, E, G, H, T, make_model
from regard import ConfigError
from regard.attribution.activation_trace import ActivationTrace
from regard.attribution.model_parts import find_parts
from regard.probe.repeated_tokens import make_probe_of_model

NEAR = {"rtol": 1e-4, "atol": 1e-5}  # float32: a gain is fitted to eight positions


def run(model, tokens=T):
    """The parts of a model, found on the first tokens of its probe, and the recording."""
    probe = make_probe_of_model(model, 61)
    trace = ActivationTrace()
    with torch.no_grad(), trace.watch(model), regard.record(model, keep="values") as recording:
        logits = model(probe.tokens[:, :tokens]).logits
    return find_parts(model, trace, recording, logits), recording


def test_gpt2s_parts_are_its_weights():
    model = make_model("gpt2")
    parts, _ = run(model)
    for layer, block in zip(parts.layers.values(), model.transformer.h, strict=True):
        torch.testing.assert_close(layer.output, block.attn.c_proj.weight.view(H, E, C), **NEAR)
        value = block.attn.c_attn.weight[:, 2 * C :].view(C, H, E).transpose(0, 1)
        torch.testing.assert_close(layer.value, value, **NEAR)
        assert layer.norm.is_centered
        torch.testing.assert_close(layer.norm.gain, block.ln_1.weight.detach(), **NEAR)
    torch.testing.assert_close(parts.norm.gain, model.transformer.ln_f.weight.detach(), **NEAR)
    assert torch.equal(parts.unembedding, model.lm_head.weight)


def test_a_projection_of_q_k_and_v_by_head_is_taken_apart():
    model = make_model("gpt_neox")
    parts, _ = run(model)
    for layer, block in zip(parts.layers.values(), model.gpt_neox.layers, strict=True):
        fused = block.attention.query_key_value.weight.view(H, 3, E, C)[:, 2]
        torch.testing.assert_close(layer.value, fused.transpose(1, 2), **NEAR)
        torch.testing.assert_close(layer.output, block.attention.dense.weight.T.view(H, E, C), **NEAR)
    assert not torch.equal(parts.unembedding, parts.embedding)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_grouped_heads_and_root_mean_square_norms_are_found(name):
    model = make_model(name)
    parts, _ = run(model)
    plus = 1 if name == "gemma" else 0  # Gemma multiplies by 1 + weight
    for layer, block in zip(parts.layers.values(), model.model.layers, strict=True):
        torch.testing.assert_close(layer.output, block.self_attn.o_proj.weight.T.view(H, E, C), **NEAR)
        value = block.self_attn.v_proj.weight.view(G, E, C).transpose(1, 2)
        torch.testing.assert_close(layer.value, value, **NEAR)
        assert not layer.norm.is_centered
        torch.testing.assert_close(layer.norm.gain, block.input_layernorm.weight.detach() + plus, **NEAR)
    torch.testing.assert_close(parts.norm.gain, model.model.norm.weight.detach() + plus, **NEAR)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_norms_are_found_from_one_or_two_tokens_to_which_norms_of_both_kinds_fit(name, tokens):
    model = make_model(name)
    (few, _), (many, _) = run(model, tokens), run(model)
    pairs = [(few.norm, many.norm), *((few.layers[one].norm, many.layers[one].norm) for one in many.layers)]
    for one, other in pairs:
        assert one.is_centered == other.is_centered == (name == "gpt2")
        torch.testing.assert_close(one.gain, other.gain, **NEAR)


def test_logits_of_another_head_are_refused():
    model = make_model("llama")
    probe = make_probe_of_model(model, 61)
    trace = ActivationTrace()
    with torch.no_grad(), trace.watch(model), regard.record(model, keep="values") as recording:
        logits = model(probe.tokens).logits
    with pytest.raises(ConfigError, match="not the output of the last norm times the unembedding"):
        find_parts(model, trace, recording, logits.flip(-1))
    with pytest.raises(ConfigError, match="not the output of the last norm times the unembedding"):
        find_parts(model, trace, recording, logits, unembedding=torch.randn(61, C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gain", [1.0, 0.5, 0.22])
def test_an_output_projection_is_times_what_the_model_multiplies_its_output_by(dtype, gain):
    model = make_model("granite").to(dtype)
    for block in model.model.layers:
        block.residual_multiplier = gain
    parts, _ = run(model)
    for layer, block in zip(parts.layers.values(), model.model.layers, strict=True):
        expected = gain * block.self_attn.o_proj.weight.T.view(H, E, C).float()
        near = (
            NEAR
            if dtype == torch.float32
            else {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps * float(expected.detach().abs().max())}
        )
        torch.testing.assert_close(layer.output.float(), expected, **near)


@pytest.mark.parametrize(
    ("name", "factor"), [("bloom", 1), ("llama", 1), ("gpt2", 1), ("gemma", C**0.5), ("granite", 3), ("xglm", C**0.5)]
)
def test_the_embedding_is_what_the_first_layer_reads_of_each_token(name, factor):
    model = make_model(name)
    parts, _ = run(model)
    weight = model.get_input_embeddings().weight.detach() * factor
    with torch.no_grad():
        expected = model.transformer.word_embeddings_layernorm(weight) if name == "bloom" else weight
    torch.testing.assert_close(parts.embedding, expected, **NEAR)
