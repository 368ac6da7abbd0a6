import base64
import copy
import io
import json
import operator
from dataclasses import replace

import numpy as np
import pytest
import torch

from observe.eager_weights import run
from observe.families import find_family
from observe.recording_checks import EQUAL
from regard import AttentionMap, Causal, ConfigError, TooLargeError, attend
from regard.observe import record
from regard.observe.stored_calls.lazy_attentions import Attentions

B, H, G, Q, D = 2, 4, 2, 7, 11


@pytest.fixture
def both(in_float64):
    """A map as a program gets it, and the tensor that the program expects, in float64."""
    q, k = torch.randn(B, H, Q, D), torch.randn(B, G, Q, D)
    return Attentions(AttentionMap(q, k, Causal())), attend(q, k, k, Causal()).weights


@pytest.fixture
def large():
    """Attentions of 2 x 4 x 65,536 x 65,536."""
    return Attentions(AttentionMap(torch.randn(B, H, 2**16, 2), torch.randn(B, G, 2**16, 2)))


USES = {
    "indexing": lambda a: a[0, 1],
    "a slice": lambda a: a[..., 2:5],
    "None": lambda a: a[:, None],
    "a list": lambda a: a[0, [1, 3]],
    "a bool mask": lambda a: a[torch.ones(B, H, Q, Q).bool().tril()],
    "mean over heads": lambda a: a.mean(1),
    "max": lambda a: a.max(dim=-1).values,
    "argmax": lambda a: a.argmax(-1),
    "topk": lambda a: a.topk(2).values,
    "transpose": lambda a: a.transpose(-1, -2),
    "view": lambda a: a.view(B * H, Q, Q),
    "float": lambda a: a.float(),
    "to": lambda a: a.to(torch.float64),
    "clone": lambda a: a.detach().cpu().clone(),
    "numpy": lambda a: torch.from_numpy(a.detach().cpu().numpy()),
    "numpy itself": lambda a: torch.from_numpy(a.numpy()),
    "asarray": lambda a: torch.from_numpy(np.asarray(a)),
    "tolist": lambda a: torch.tensor(a.tolist()),
    "stack": lambda a: torch.stack([a, a]),
    "stack of a tuple": lambda a: torch.stack((a, a)).mean(0),
    "a list of them": lambda a: torch.stack(list(a)),
    "plus": lambda a: a + 1,
    "with a tensor": lambda a: a * torch.arange(Q),
    "minus": lambda a: torch.eye(Q) - a,
    "over its sum": lambda a: a / a.sum(-1, keepdim=True),
    "squared": lambda a: a**2,
    "abs": lambda a: abs(a),
    "above": lambda a: a > 0.3,
    "equal": lambda a: a == 0,
    "equal to a tensor": lambda a: a == torch.zeros(B, H, Q, Q),
    "product of two": lambda a: a @ a,
    "product with a tensor": lambda a: a @ torch.ones(B, H, Q, 3),
    "product from the left": lambda a: torch.ones(B, H, 3, Q) @ a,
    "einsum": lambda a: torch.einsum("bhqk->bk", a),
    "where": lambda a: torch.where(a > 0.1, a, 0.0),
    "allclose": lambda a: torch.tensor(torch.allclose(a, a)),
    "diagonal of two axes": lambda a: a.diagonal(dim1=-2, dim2=-1),
    "logsumexp along an axis": lambda a: a.logsumexp(-1),
    "put into a tensor": lambda a: torch.zeros(B, H, Q + 2, Q).index_copy_(2, torch.arange(Q), a[...]),
    "length": lambda a: torch.tensor(len(a)),
    "a tensor made of it": lambda a: torch.as_tensor(a),
    "dlpack": lambda a: torch.from_dlpack(a),
    "dlpack to numpy": lambda a: torch.from_numpy(np.from_dlpack(a).copy()),
    "augmented assignment": lambda a: operator.iadd(operator.imul(a, 2), 1),
    "saved and loaded": lambda a: save_and_load(a),
    "with functions of tensors switched off": lambda a: without_torch_function(a),
}


def save_and_load(a):
    file = io.BytesIO()
    torch.save(a, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def without_torch_function(a):
    with torch._C.DisableTorchFunctionSubclass():
        return torch.exp(a)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_program_gets_from_the_map_what_it_would_get_from_the_tensor(both, use):
    found, expected = use(both[0]), use(both[1])
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)


EINOPS = {
    "rearrange": lambda e, a: e.rearrange(a, "b h q k -> q (b h) k"),
    "reduce": lambda e, a: e.reduce(a, "b h q k -> b q k", "mean"),
    "repeat": lambda e, a: e.repeat(a, "b h q k -> b h q (k 2)"),
    "einsum": lambda e, a: e.einsum(a, a, "b h q k, b g q k -> b h g"),
    "a list of layers": lambda e, a: e.rearrange([a, a], "l b h q k -> b l h q k"),
    "pack": lambda e, a: e.pack([a, a], "b * q k")[0],
}


@pytest.mark.parametrize("use", EINOPS.values(), ids=EINOPS)
def test_einops_takes_it_as_the_tensor(both, use):
    einops = pytest.importorskip("einops", reason="einops is not installed")
    found, expected = use(einops, both[0]), use(einops, both[1])
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)


def test_inspectus_draws_it_as_the_tensor(in_float64, monkeypatch):
    """Its picture holds the weights of each head as float32, base64 in JSON; attentions are a tuple of the layers."""
    inspectus = pytest.importorskip("inspectus", reason="inspectus is not installed: pip install inspectus")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda what: shown.append(what.data))
    q, k = torch.randn(1, H, Q, D), torch.randn(1, G, Q, D)
    tokens = list("abcdefg")
    inspectus.attention((Attentions(AttentionMap(q, k, Causal())),) * 2, tokens)
    (picture,) = [data for data in shown if "chartsEmbed('id_" in data]
    drawn = json.JSONDecoder().raw_decode(picture[picture.index('{"attention"') :])[0]
    weights = attend(q, k, k, Causal()).weights[0].float()
    assert [head["info"] for head in drawn["attention"]] == [{"layer": n, "head": m} for n in range(2) for m in range(H)]
    assert drawn["src_tokens"] == tokens
    for head in drawn["attention"]:
        values = torch.frombuffer(bytearray(base64.b64decode(head["values"])), dtype=torch.float32).view(head["shape"])
        torch.testing.assert_close(values, weights[head["info"]["head"]], rtol=0, atol=torch.finfo(torch.float32).eps)


def test_it_is_a_tensor_whoever_asks(both):
    m, weights = both
    assert isinstance(m, torch.Tensor)
    assert torch.is_tensor(m)
    assert torch.is_floating_point(m)
    assert (m.layout, m.element_size(), m.is_leaf) == (weights.layout, weights.element_size(), True)
    assert m.to(torch.float64) is m.to("cpu") is m.to(m) is m
    assert torch.equal(m.to("cpu", copy=True), m.dense())


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.fill_(1),
        lambda a: operator.setitem(a, 0, 1.0),
        lambda a: torch.add(a.dense(), 1, out=a),
        lambda a: torch.dropout_(a, 0.5, True),
        lambda a: a.requires_grad_(),
        lambda a: setattr(a, "data", torch.zeros(2)),
    ],
)
def test_it_is_not_written_to_in_silence(both, write):
    with pytest.raises(ConfigError, match=r"write to \.dense\(\)"):
        write(both[0])


def test_it_can_be_put_into_a_tensor(both):
    whole = torch.zeros(B, H, Q + 1, Q + 1)
    whole[..., 1:, :Q] = both[0]
    torch.testing.assert_close(whole[..., 1:, :Q], both[1], rtol=0, atol=EQUAL)


def test_its_shape_dtype_and_device_cost_nothing(large):
    assert large.shape == large.size() == torch.Size([B, H, 2**16, 2**16])
    assert (large.dim(), large.ndim, large.size(-1), len(large)) == (4, 4, 2**16, B)
    assert large.dtype == torch.float32
    assert large.device.type == "cpu"
    assert large.numel() == B * H * 2**32
    assert not large.requires_grad
    assert not large.is_cuda
    assert large.detach() is large


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a.cpu(),
        lambda a: a.numpy(),
        lambda a: a.mean(1),
        lambda a: a + 1,
        lambda a: a > 0,
        lambda a: torch.stack([a, a]),
        lambda a: torch.cat((a, a)),
        lambda a: np.asarray(a),
        lambda a: torch.from_dlpack(a),
        lambda a: list(a),
        lambda a: a[0, 0],
        lambda a: a[:, None],
    ],
)
def test_what_is_too_large_states_the_bytes_and_what_to_ask_for_instead(large, use):
    with pytest.raises(TooLargeError, match=r"bytes.*m\.(pooled|top)"):
        use(large)


def test_what_is_small_is_answered_at_any_size(large):
    assert large[0, 0, -1].shape == (2**16,)
    assert large[1, 2, 5, 7].shape == ()
    assert large[0, :, 3, :4].shape == (H, 4)


def test_it_is_a_map_too(both):
    m, weights = both
    assert isinstance(m, AttentionMap)
    torch.testing.assert_close(m.received(), weights.sum(2), rtol=0, atol=EQUAL)
    torch.testing.assert_close(m.diagonal(back=1)[:, :, 1:], weights.diagonal(-1, -2, -1), rtol=0, atol=EQUAL)
    assert m.logsumexp().shape == (B, H, Q)
    assert m.pooled(2, 3).shape == m.tile(slice(0, 5), slice(0, 5), (2, 3)).shape == (B, H, 2, 3)
    assert isinstance(m.select(heads=[2]), Attentions)
    torch.testing.assert_close(m.select(heads=[2]).cpu(), weights[:, 2:3], rtol=0, atol=EQUAL)


def test_it_is_hashed_copied_and_distinguished_from_what_a_tensor_has_not(both):
    m = both[0]
    assert len({m, m}) == 1
    assert repr(m).startswith("AttentionMap(2, 4, 7, 7), Causal()")
    assert torch.equal(copy.deepcopy(m).dense(), m.dense())
    assert not hasattr(m, "no_such_thing")


@pytest.mark.parametrize("name", ["radio", "t5gemma2"])
def test_a_model_that_works_on_its_own_weights_is_safe(name):
    model = find_family(name).build()
    given = find_family(name).feed(model)
    plain, _ = run(model, given)
    inside, _ = run(model, given, recorded=True, output_attentions=True)
    assert torch.equal(plain.last_hidden_state, inside.last_hidden_state)


@pytest.mark.usefixtures("float64_models")
def test_attentions_of_a_generation_are_maps_a_step_and_a_layer():
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "return_dict_in_generate": True}
    llama = replace(find_family("llama"), model="LlamaForCausalLM")
    model, other = llama.build(torch.float64), llama.build(torch.float64, attn_implementation="eager")
    given = llama.feed(model)
    with record(model):
        inside = model.generate(**given, **asked, output_attentions=True)
    expected = other.generate(**given, **asked, output_attentions=True)
    assert torch.equal(inside.sequences, expected.sequences)
    for step, theirs in zip(inside.attentions, expected.attentions, strict=True):
        for ours, weights in zip(step, theirs, strict=True):
            assert isinstance(ours, AttentionMap)
            torch.testing.assert_close(ours.cpu(), weights, rtol=0, atol=EQUAL)


@pytest.mark.slow
@pytest.mark.usefixtures("float64_models")
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"heads": [1]}, {"keep": "bfloat16"}, {"layers": [2]}], ids=str)
def test_attentions_of_a_static_cache_have_all_its_slots_as_those_of_eager_attention(side, implementation, options):
    llama = replace(find_family("llama"), model="LlamaForCausalLM")
    model, other = (llama.build(torch.float64, attn_implementation=name) for name in (implementation, "eager"))
    given = llama.feed(model, side)
    asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "suppress_tokens": [0, 1, 2]}
    asked |= {"return_dict_in_generate": True, "cache_implementation": "static", "disable_compile": True}
    expected = other.generate(**given, **asked, output_attentions=True)
    with record(model, **options):
        inside = model.generate(**given, **asked, output_attentions=True)
    for step, theirs in zip(inside.attentions, expected.attentions, strict=True):
        for ours, weights in zip(step, theirs, strict=True):
            assert isinstance(ours, AttentionMap)
            assert ours.shape == weights.shape
            blind = ~ours.dense().any(-1, keepdim=True)  # a kernel gives zeros where eager attention is uniform
            assert implementation == "sdpa" or not blind.any()
            assert ((ours.dense() - weights) * ~blind).abs().max() < EQUAL
