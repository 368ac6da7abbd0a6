"""Gradients with respect to the entries of layers without a softmax are those of a matrix that is added to them."""

import importlib

import pytest
import torch

import regard
from dense import close
from observe.recurrent_models import RECURRENT, draw_tokens

FAMILIES = {one.name: one for one in RECURRENT}
T = 13
SCANS = {"mamba": "mamba_selective_scan", "mamba2": "mamba2_chunk_scan", "bamba": "mamba2_chunk_scan"}
IS_CHANNEL_FIRST = {"mamba": True, "mamba2": False, "bamba": False}


def get_number(logits):
    return logits[0, -1, 7] - logits[0, -1, 3] + logits[1, 4, 5]


def attribute(name):
    """A model, what was recorded of it, and its attribution."""
    model = FAMILIES[name].build().double()
    with regard.record(model, keep="values") as recording:
        logits = model(draw_tokens(T)).logits
    return model, recording, recording.attribute(get_number(logits))


def differentiate_by_hand(name, model, monkeypatch):
    """The gradient with respect to a matrix (b, h, t, t) of zeros that is added to that of each scan, in order."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    scan, added = getattr(module, SCANS[name]), []

    def run(*args, **kwargs):
        result, values = scan(*args, **kwargs), kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        output = result[0] if isinstance(result, tuple) else result
        v = values.unsqueeze(-1) if IS_CHANNEL_FIRST[name] else values.transpose(1, 2)
        added.append(torch.zeros(*v.shape[:2], T, T, dtype=torch.float64, requires_grad=True))
        more = added[-1] @ v
        output = output + (more.squeeze(-1) if IS_CHANNEL_FIRST[name] else more.transpose(1, 2))
        return (output, *result[1:]) if isinstance(result, tuple) else output

    with monkeypatch.context() as patch:
        patch.setattr(module, SCANS[name], run)
        number = get_number(model(draw_tokens(T)).logits)
    return [one.tril() for one in torch.autograd.grad(number, added)]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba"])
def test_gradients_and_pulls_are_those_of_an_added_matrix(name, monkeypatch):
    model, recording, attribution = attribute(name)
    expected = differentiate_by_hand(name, model, monkeypatch)
    assert len(expected) == len(recording.layers("implicit")) > 1
    for layer, gradient in enumerate(expected):
        entries = recording.map(layer, kind="implicit").dense()
        found = attribution.map(layer, kind="gradient", attention="implicit")
        close(found.dense(), gradient)
        close(found[:, 1:, 2:5], gradient[:, 1:, 2:5])
        pull = attribution.map(layer, attention="implicit")
        close(pull.dense(), gradient * entries)
        close(pull[1, 2, [4, 12], 3], (gradient * entries)[1, 2, [4, 12], 3])
        close(pull.row_sums(), (gradient * entries).sum(-1))
        close(attribution.map(layer, 3, attention="implicit").dense(), (gradient * entries)[:, [3]])


@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_relevance_multiplies_the_positive_pulls_of_all_layers_in_their_order(name, monkeypatch):
    model, recording, attribution = attribute(name)
    gradients = differentiate_by_hand(name, model, monkeypatch)
    identity = expected = torch.eye(T, dtype=torch.float64)
    ran = {"implicit": 0, "self": 0}
    for call in recording.calls:
        number = ran[call.kind]
        ran[call.kind] += 1
        if call.kind == "self":
            pull = attribution.map(number).dense()
        else:
            pull = gradients[number] * recording.map(number, kind="implicit").dense()
        expected = (identity + pull.clamp(min=0).mean(1)) @ expected
    close(attribution.relevance(slice(None)), expected)
    close(attribution.relevance(), expected[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent_gemma", "lfm2", "qwen3_5_text", "kimi_linear"])
def test_pulls_of_other_families_add_up_to_gradient_times_output(name):
    model = FAMILIES[name].build()
    with regard.record(model, keep="values") as recording:
        output = model(draw_tokens(T))
    number = (output.logits if hasattr(output, "logits") else output[0]).double()[0, -1, 3]
    attribution = recording.attribute(number)
    for layer in range(len(recording.layers("implicit"))):
        pull = attribution.map(layer, attention="implicit")
        assert pull.left.any()
        outputs = recording.map(layer, kind="implicit") @ recording.values(layer, kind="implicit")
        close(pull.row_sums(), (pull.left * outputs).sum(-1), atol=1e-5 * float(pull.row_sums().abs().max()))
    assert attribution.relevance().shape == (2, T)


def test_the_model_computes_the_same_bits_and_gradients():
    model, tokens = FAMILIES["bamba"].build(), draw_tokens(T)
    plain = model(tokens).logits
    expected = torch.autograd.grad(get_number(plain), model.get_input_embeddings().weight)[0]
    with regard.record(model, keep="values"):
        logits = model(tokens).logits
    assert torch.equal(plain, logits)
    assert torch.equal(expected, torch.autograd.grad(get_number(logits), model.get_input_embeddings().weight)[0])
