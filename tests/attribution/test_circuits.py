"""Circuits beside the products of the model's own weights, and beside what the model computed."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

import regard
from attribution.small_models import GROUPED, TOKENS, C, E, G, H, N, make_model
from observe.models import words
from regard.attribution.circuits import measure_rotation
from regard.attribution.model_parts import Norm
from regard.errors import ConfigError, OutOfRangeError
from regard.probe.copying import score_eigenvalues, score_ov_eigenvalues

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
EQUAL = {"rtol": 1e-8, "atol": 1e-8}  # float64, of products of a dozen numbers near 1
T = 13


def make_tokens():
    return words(2, T) % N


def list_weights(model, name, number):
    """The linear part of the norm (c, c) of rows, W_Q, W_K, W_V (c, e) of each head and W_O (e, c), of a layer."""
    if name == "gpt2":
        block = model.transformer.h[number]
        q, k, v = block.attn.c_attn.weight.view(C, 3, H, E).permute(1, 2, 0, 3)
        return center() * block.ln_1.weight, q, k, v, block.attn.c_proj.weight.view(H, E, C)
    block = model.model.layers[number]
    layer = block.self_attn
    q = layer.q_proj.weight.view(H, E, C).transpose(1, 2)
    k, v = (one.weight.view(G, E, C).transpose(1, 2).repeat_interleave(H // G, 0) for one in (layer.k_proj, layer.v_proj))
    return torch.diag(block.input_layernorm.weight), q, k, v, layer.o_proj.weight.T.view(H, E, C)


def center():
    return torch.eye(C) - 1 / C


def watch_residual(model, name, number, tokens):
    """What goes into the norm before a layer's attention, divided by the norm's scale, (t, c) of the first row."""
    block = model.transformer.h[number].ln_1 if name == "gpt2" else model.model.layers[number].input_layernorm
    found = []
    hook = block.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    model(tokens)
    hook.remove()
    norm = Norm(block.weight, name == "gpt2", block.eps if name == "gpt2" else block.variance_epsilon)
    return found[0] / norm.measure_scale(found[0]).unsqueeze(-1)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_ov_circuits_are_the_products_of_the_weights(name):
    model = make_model(name)
    circuits = regard.find_circuits(model, make_tokens())
    last = center() * model.transformer.ln_f.weight if name == "gpt2" else torch.diag(model.model.norm.weight)
    embedding, words = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for layer in range(2):
        norm, _, _, v, output = list_weights(model, name, layer)
        for head in range(H):
            expected = norm @ v[head] @ output[head]
            found = circuits.ov(layer, head)
            assert (found.shape, found.left.shape) == ((C, C), (C, E))
            torch.testing.assert_close(found[:], expected, **EQUAL)
            found = circuits.ov(layer, head, "tokens")
            assert (found.shape, found.right.shape) == ((N, N), (E, N))
            torch.testing.assert_close(found[:], embedding @ expected @ last @ (words - words.mean(0)).T, **EQUAL)


@torch.no_grad()
def test_qk_circuits_of_gpt2_are_the_products_of_the_weights():
    model = make_model("gpt2")
    circuits, embedding = regard.find_circuits(model, make_tokens()), model.transformer.wte.weight
    for layer in range(2):
        norm, q, k, *_ = list_weights(model, "gpt2", layer)
        for head in range(H):
            expected = norm @ q[head] @ (norm @ k[head]).T
            torch.testing.assert_close(circuits.qk(layer, head)[:], expected, **EQUAL)
            torch.testing.assert_close(circuits.qk(layer, head, "tokens")[:], embedding @ expected @ embedding.T, **EQUAL)


@torch.no_grad()
def test_scores_of_gpt2_are_those_of_the_circuit_up_to_terms_of_the_query_and_of_the_key():
    model, tokens = make_model("gpt2"), make_tokens()
    circuits = regard.find_circuits(model, tokens)
    middle = torch.eye(T) - 1 / T  # takes away what depends on the query or on the key alone: the biases
    for layer in range(2):
        x = watch_residual(model, "gpt2", layer, tokens)
        q, k = (getattr(circuits.recording[circuits.recording.layers()[layer]][0].map.planes.request, one)[0] for one in "qk")
        for head in range(H):
            found = x @ (circuits.qk(layer, head) @ x.T)
            torch.testing.assert_close(middle @ found @ middle, middle @ (q[head] @ k[head].T) @ middle, **EQUAL)


@pytest.mark.parametrize("rank", [C, C // 2])
@torch.no_grad()
def test_values_that_are_projected_from_a_latent_vector_have_no_ov_circuit(rank):
    """Multi-head latent attention (DeepSeek-V2): W_V reads a normed projection of the stream, not the stream."""
    sizes = {key: GROUPED[key] for key in GROUPED if key not in ("num_key_value_heads", "head_dim")}
    widths = {"kv_lora_rank": rank, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": E}
    config = DeepseekV3Config(**sizes, **TOKENS, num_key_value_heads=H, **widths, first_k_dense_replace=2)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    circuits = regard.find_circuits(model, make_tokens())
    with pytest.raises(ConfigError, match="no OV circuit"):
        circuits.ov(0, 0)
    table = regard.probe_heads(model, ablate="none")
    assert all(torch.tensor(float(row.scores["ov"])).isnan() for row in table)
    assert not any(torch.tensor(float(row.scores["copying"])).isnan() for row in table)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@torch.no_grad()
def test_rotary_positions_of_a_part_of_the_columns_are_measured(share):
    torch.manual_seed(1)
    sizes = {**{key: GROUPED[key] for key in GROUPED if key not in ("num_key_value_heads", "head_dim")}, "hidden_size": 32}
    rotary = {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": share}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **TOKENS, rope_parameters=rotary, initializer_range=0.5)).eval()
    assert model.gpt_neox.rotary_emb.inv_freq.shape == (4 * share,)
    circuits = regard.find_circuits(model, make_tokens())
    weight = model.gpt_neox.layers[1].attention.query_key_value.weight.view(H, 3, 8, 32).transpose(2, 3)
    norm = torch.eye(32) - 1 / 32
    distance = 5
    turned = regard.mechanism.positions.rotary(weight[2, 0, :, : int(8 * share)], torch.full((32,), distance))
    left = torch.cat([turned, weight[2, 0, :, int(8 * share) :]], -1)
    expected = norm @ left @ (norm @ weight[2, 1]).T
    torch.testing.assert_close(
        circuits.qk(1, 2, distance=distance)[:], expected, rtol=1e-5, atol=1e-5
    )  # its angles are float32


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_what_a_vector_becomes_through_the_ov_circuit_is_its_value_times_the_output_projection(name):
    model, tokens = make_model(name), make_tokens()
    circuits = regard.find_circuits(model, tokens)
    for layer in range(2):
        x, values = watch_residual(model, name, layer, tokens), circuits.recording.values(layer)[0]
        *_, output = list_weights(model, name, layer)
        for head in range(H):
            found, expected = x @ circuits.ov(layer, head), values[head * len(values) // H] @ output[head]
            if name == "gpt2":  # but for the biases, which are the same at every position
                found, expected = found - found.mean(0), expected - expected.mean(0)
            torch.testing.assert_close(found, expected, **EQUAL)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_eigenvalues_over_the_vocabulary_give_the_score_of_copying(name):
    circuits = regard.find_circuits(make_model(name), make_tokens())
    for layer, part in enumerate(circuits.parts.layers.values()):
        for head, score in enumerate(score_ov_eigenvalues(part, circuits.parts)):
            found = circuits.ov(layer, head, "tokens")
            assert float(score_eigenvalues(found.eigenvalues())) == pytest.approx(float(score), abs=1e-9)
            dense = torch.linalg.eigvals(found[:])
            dense = dense[dense.abs().argsort(descending=True)[:E]]
            assert float(dense.real.sum() / dense.abs().sum()) == pytest.approx(float(score), abs=1e-6)


@pytest.mark.parametrize("where", [(2, 0), (0, H), (-3, 0)])
def test_a_head_that_is_not_there_is_refused(where):
    circuits = regard.find_circuits(make_model("gpt2"), make_tokens())
    for find in (circuits.ov, circuits.qk):
        with pytest.raises(OutOfRangeError):
            find(*where)
        with pytest.raises(ConfigError):
            find(0, 0, "vocabulary")


@pytest.mark.parametrize("tokens", [torch.ones(1, 3), torch.ones(3).long(), "text", torch.ones(1, 1).long()])
def test_an_input_that_is_not_two_tokens_is_refused(tokens):
    with pytest.raises(ConfigError, match="tokens must be ids"):
        regard.find_circuits(make_model("gpt2"), tokens)


@pytest.mark.parametrize("rotated", [2, 6, 12, 16])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_rotation_of_any_number_of_columns_is_measured(rotated, is_interleaved, dtype):
    torch.manual_seed(0)
    columns = torch.arange(rotated)
    first, second = (columns[::2], columns[1::2]) if is_interleaved else columns.chunk(2)
    angles = 40 * torch.linspace(0.03, 1, len(first), dtype=torch.float64)
    expected = torch.eye(16, dtype=torch.float64)
    expected[first, first] = expected[second, second] = angles.cos()
    expected[first, second], expected[second, first] = angles.sin(), -angles.sin()
    x = torch.randn(50, 16, dtype=torch.float64)
    found = measure_rotation(x, (x @ expected).to(dtype).double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps)
