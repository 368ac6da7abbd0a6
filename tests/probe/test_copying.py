import pytest
import torch

import regard
from attribution.small_models import C, E, G, H, make_model
from bounds import sum_bound
from regard.attribution.activation_trace import ActivationTrace
from regard.attribution.model_parts import find_parts
from regard.observe.map_view import MapView
from regard.probe.copying import score_copying, score_ov_eigenvalues
from regard.probe.repeated_tokens import make_probe_of_model

CHAIN = 6  # float32 products after one another: values, projection, norm, unembedding, weights, division


def run(model):
    probe = make_probe_of_model(model, 61, seeds=2)
    trace = ActivationTrace()
    with torch.no_grad(), trace.watch(model), regard.record(model, keep="values") as recording:
        logits = model(probe.tokens).logits
    return probe, recording, find_parts(model, trace, recording, logits)


def compute_dense_copying(model, name, recording, number, tokens):
    """The same sum from dense float64 tensors: what each key adds to each logit, by the model's own weights."""
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    block = model.transformer.h[number].attn if name == "gpt2" else model.model.layers[number].self_attn
    output = block.c_proj.weight if name == "gpt2" else block.o_proj.weight.T
    final = []
    hook = norm.register_forward_pre_hook(lambda _, args: final.append(args[0].double()))
    model(tokens)
    hook.remove()
    x = final[0] - (final[0].mean(-1, keepdim=True) if name == "gpt2" else 0)
    scale = (x.square().mean(-1) + (norm.eps if name == "gpt2" else norm.variance_epsilon)).sqrt()
    values = recording.values(number).double().repeat_interleave(H // recording.values(number).shape[1], 1)
    weights = recording.map(number).dense().double()
    added = torch.einsum("bhij,bhje,hec->bhijc", weights, values, output.double().view(H, E, C))
    added = added - (added.mean(-1, keepdim=True) if name == "gpt2" else 0)
    logits = (added * norm.weight.double() / scale[:, None, :, None, None]) @ model.lm_head.weight.double().T
    own = tokens[:, None, None, :, None].expand(*logits.shape[:4], 1)
    return (logits.gather(-1, own).squeeze(-1) - logits.mean(-1)).sum(-1), logits.abs().sum((-1, -2)).max()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_copying_is_what_the_attended_tokens_logits_gain_by_the_direct_path(name):
    model = make_model(name)
    probe, recording, parts = run(model)
    for number, layer in enumerate(parts.layers.values()):
        found = score_copying(MapView(recording.map(number)), recording.values(number), layer, parts, probe.tokens)
        expected, size = compute_dense_copying(model, name, recording, number, probe.tokens)
        assert found.values.shape == expected.shape
        near = CHAIN * sum_bound(torch.float32, probe.tokens.shape[1] * C) * float(size)
        assert float((found.values - expected).abs().max()) <= near
        assert float(expected.abs().max()) > 100 * near  # the bound tells right from wrong


@torch.no_grad()
def test_the_eigenvalue_score_is_that_of_the_whole_circuit_over_the_vocabulary():
    model = make_model("llama")
    _, _, parts = run(model)
    words, final = model.lm_head.weight.double(), model.model.norm.weight.double()
    embedding = model.model.embed_tokens.weight.double()
    for layer, block in zip(parts.layers.values(), model.model.layers, strict=True):
        found = score_ov_eigenvalues(layer, parts)
        for head in range(H):
            value = block.self_attn.v_proj.weight.double().view(G, E, C)[head * G // H].T
            output = block.self_attn.o_proj.weight.double().T.view(H, E, C)[head]
            circuit = embedding @ torch.diag(block.input_layernorm.weight.double()) @ value @ output
            circuit = circuit @ torch.diag(final) @ (words - words.mean(0)).T  # (n, n), of rank e
            eigenvalues = torch.linalg.eigvals(circuit)
            largest = eigenvalues[eigenvalues.abs().argsort(descending=True)[:E]]  # the others are 0 up to rounding
            assert float(found[head]) == pytest.approx(float(largest.real.sum() / largest.abs().sum()), abs=1e-3)


@torch.no_grad()
def test_a_circuit_that_maps_each_token_to_itself_scores_one_and_its_negative_minus_one():
    model = make_model("llama")
    model.model.norm.weight.fill_(1.0)
    for sign, block in zip((1.0, -1.0), model.model.layers, strict=True):
        block.input_layernorm.weight.fill_(1.0)
        value = torch.randn(G * E, C)
        block.self_attn.v_proj.weight.copy_(value)
        words = model.lm_head.weight - model.lm_head.weight.mean(0)
        product = words.T @ model.model.embed_tokens.weight  # a head's circuit W_O P W_V is then W_Vᵀ Pᵀ P W_V: positive
        shared = value.view(G, E, C).repeat_interleave(H // G, 0)
        block.self_attn.o_proj.weight.copy_(sign * (shared @ product.T).flatten(0, 1).T)
    _, _, parts = run(model)
    first, second = (score_ov_eigenvalues(layer, parts) for layer in parts.layers.values())
    torch.testing.assert_close(first, torch.ones_like(first), rtol=0, atol=1e-6)
    torch.testing.assert_close(second, -torch.ones_like(second), rtol=0, atol=1e-6)
