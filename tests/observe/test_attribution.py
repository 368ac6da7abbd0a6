"""Attribution beside autograd on the dense weights of the same model's eager attention."""

import contextlib

import pytest
import torch

import regard
from bounds import estimate_rounding
from observe.families import find_family
from observe.family import Widened
from observe.models import bart, gpt2, words
from regard.errors import ConfigError, ShapeError

EQUAL = 1e-10  # float64
LAST = 7  # a token that is padding in none of the sequences
NAMES = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bert", "t5", "bart")


def pick_number(output):
    """A number that depends on every layer."""
    hidden = output.last_hidden_state
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden.shape[-1], generator=generator, dtype=torch.float64)
    return (hidden[:, LAST] * direction.to(hidden.dtype)).sum()


def dense_gradients(family, given, *further):
    """The weights of every layer of eager attention, and the gradients of the number with respect to them."""
    model = family.build(torch.float64, attn_implementation="eager")
    with Widened():
        output = model(**given, output_attentions=True)
    found = {}
    for name, kind in (("attentions", "self"), ("decoder_attentions", "self"), ("cross_attentions", "cross"), *further):
        for layer, weights in enumerate(getattr(output, name, None) or ()):
            found[kind, layer] = weights
    gradients = torch.autograd.grad(pick_number(output), list(found.values()), allow_unused=True)
    return {key: (weights.detach(), gradient) for (key, weights), gradient in zip(found.items(), gradients, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["none", "right"])
def test_gradient_and_pull_are_those_of_autograd_on_dense_weights(name, side):
    family = find_family(name)
    model = family.build(torch.float64)
    given = family.feed(model, side)
    expected = dense_gradients(family, given)
    with Widened(), regard.record(model, keep="values") as recording:
        output = model(**given)
    attribution = recording.attribute(pick_number(output))
    assert expected
    for (kind, layer), (weights, gradient) in expected.items():
        visible = recording.map(layer, kind=kind).dense() > 0
        gradient = torch.zeros_like(weights) if gradient is None else gradient
        found = attribution.map(layer, kind="gradient", attention=kind)
        size = max(float(gradient.abs().max()), 1e-6)
        assert float((found.dense() - gradient).where(visible, 0).abs().max()) < EQUAL * size
        pull = attribution.map(layer, attention=kind)
        assert float((pull.dense() - weights * gradient).where(visible, 0).abs().max()) < EQUAL * size
        assert pull.certificate().error < EQUAL
        scores = attribution.map(layer, kind="scores", attention=kind)
        expected_scores = weights * (gradient - (weights * gradient).sum(-1, keepdim=True))
        assert float((scores.dense() - expected_scores).where(visible, 0).abs().max()) < EQUAL * size


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "terms"), [(torch.float32, 4 * 48), (torch.bfloat16, 4)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_in_less_precision_the_pull_is_off_by_no_more_than_the_model_rounds(name, dtype, terms):
    """Beside autograd on dense weights in float64; in float32 by less than 1e-5 of the largest entry.

    Sums of bfloat16 are of float32: a weight, a factor and a result are rounded, forward and backward.
    """
    family = find_family(name)
    given = family.feed(family.build(torch.float64), "none")

    def run_eager(model):
        with Widened():
            output = model(**given, output_attentions=True)
        gradients = torch.autograd.grad(pick_number(output), output.attentions)
        return torch.stack([one.detach() * other for one, other in zip(output.attentions, gradients, strict=True)])

    exact = family.build(torch.float64, attn_implementation="eager")
    expected = run_eager(exact)
    model = family.build(dtype)
    with regard.record(model, keep="values") as recording:
        number = pick_number(model(**given))
    attribution = recording.attribute(number)
    found = torch.stack([attribution.map(layer).dense().double() for layer in range(len(expected))])
    difference = float((found - expected).abs().max())
    allowed, size = estimate_rounding(exact, run_eager, terms, dtype), float(expected.abs().max())
    assert difference <= allowed < size
    assert dtype != torch.float32 or difference < 1e-5 * size


def test_relevance_is_that_of_dense_matrices():
    family = find_family("gpt2")
    model = family.build(torch.float64)
    given = family.feed(model, "none")
    expected = torch.eye(given["input_ids"].shape[1], dtype=torch.float64)
    for weights, gradient in dense_gradients(family, given).values():
        expected = expected + (weights * gradient).clamp(min=0).mean(1) @ expected
    with Widened(), regard.record(model, keep="values") as recording:
        output = model(**given)
    attribution = recording.attribute(pick_number(output))
    assert (attribution.relevance() - expected[:, -1]).abs().max() < EQUAL * float(expected.max())
    assert (attribution.relevance(slice(None)) - expected).abs().max() < EQUAL * float(expected.max())
    assert attribution.relevance([3, 5]).shape == (*expected[:, :2].shape,)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_relevance_of_the_source_is_that_of_dense_matrices_by_the_rules_for_two_texts(name):
    """The rules of Chefer et al. 2021 on whole matrices, decoder layer by decoder layer."""
    family = find_family(name)
    model = family.build(torch.float64)
    given = family.feed(model, "none")
    pulls = {
        key: torch.zeros_like(weights[:, 0]) if gradient is None else (weights * gradient).clamp(min=0).mean(1)
        for key, (weights, gradient) in dense_gradients(family, given, ("encoder_attentions", "encoder")).items()
    }

    def normalize(matrix):
        added = matrix - torch.eye(matrix.shape[-1])
        sums = added.sum(-1, keepdim=True)
        return torch.eye(matrix.shape[-1]) + torch.where(sums > 0, added / sums, 0)

    sources = torch.eye(pulls["encoder", 0].shape[-1], dtype=torch.float64)
    for layer in range(sum(kind == "encoder" for kind, _ in pulls)):
        sources = sources + pulls["encoder", layer] @ sources
    own, expected = torch.eye(pulls["self", 0].shape[-1], dtype=torch.float64), torch.zeros_like(pulls["cross", 0])
    for layer in range(sum(kind == "cross" for kind, _ in pulls)):
        own, expected = own + pulls["self", layer] @ own, expected + pulls["self", layer] @ expected
        expected = expected + normalize(own).mT @ pulls["cross", layer] @ normalize(sources)
    with Widened(), regard.record(model, keep="values") as recording:
        output = model(**given)
    attribution = recording.attribute(pick_number(output))
    size = float(expected.max())
    assert size > 0
    assert (attribution.relevance(slice(None), attention="cross") - expected).abs().max() < EQUAL * size
    assert (attribution.relevance(LAST, attention="cross") - expected[:, LAST]).abs().max() < EQUAL * size


@pytest.mark.parametrize("chosen", [{"layers": [0, 2]}, {"heads": [1, 3]}], ids=["layers", "heads"])
def test_relevance_and_rollout_are_those_of_the_recorded_layers_and_heads(chosen):
    family = find_family("llama")
    model = family.build(torch.float64)
    given = family.feed(model, "none")
    with Widened(), regard.record(model, keep="values") as whole, regard.record(model, keep="values", **chosen) as recording:
        output = model(**given)
    number = pick_number(output)
    layers = chosen.get("layers", range(len(whole.layers())))
    heads = chosen.get("heads", slice(None))
    attribution = whole.attribute(number)
    eye = torch.eye(whole.map(0).shape[3], dtype=torch.float64)
    relevance = rolled = eye
    for layer in layers:
        relevance = (attribution.map(layer).dense()[:, heads].clamp(min=0).mean(1) + eye) @ relevance
        rolled = (whole.map(layer).dense()[:, heads].mean(1) + eye) / 2 @ rolled
    size = float(relevance.abs().max())
    assert (recording.attribute(number).relevance(slice(None)) - relevance).abs().max() < EQUAL * size
    assert (regard.rollout(recording) - rolled).abs().max() < EQUAL


def test_what_has_no_cross_attention_has_no_relevance_of_the_source():
    model = gpt2()
    with regard.record(model, keep="values") as recording:
        number = model(words(1, 7)).logits[0, -1, 3]
    with pytest.raises(ConfigError, match="needs cross-attention, and none was recorded"):
        recording.attribute(number).relevance(attention="cross")


def test_one_head_and_recorded_heads_have_their_own_gradients():
    family = find_family("llama")
    model = family.build(torch.float64)
    given = family.feed(model, "none")
    with regard.record(model, keep="values") as whole:
        number = pick_number(model(**given))
    all_heads = whole.attribute(number).map(1)
    assert torch.equal(whole.attribute(number).map(1, 2).dense(), all_heads.dense()[:, 2:3])
    with regard.record(model, keep="values", heads=[2, 0]) as some:
        number = pick_number(model(**given))
    assert (some.attribute(number).map(1).dense() - all_heads.dense()[:, [2, 0]]).abs().max() < EQUAL
    assert torch.equal(some.attribute(number).map(1, 0).dense(), some.attribute(number).map(1).dense()[:, 1:])


def test_the_model_its_output_and_its_gradients_are_left_as_they_were():
    family = find_family("llama")
    model = family.build()
    given = family.feed(model, "none")
    plain = model(**given).last_hidden_state
    with regard.record(model, keep="values") as recording:
        inside = model(**given).last_hidden_state
    assert torch.equal(plain, inside)
    recording.attribute(inside[0, -1, 0])
    assert all(parameter.grad is None for parameter in model.parameters())
    inside.sum().backward()  # the graph is still there
    plain.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None


def test_a_difference_of_logits_is_the_difference_of_their_maps():
    model = regard.GPT2(regard.GPT2Config(layers=2, heads=2, width=8, context=12, vocabulary=30)).double()
    ids = torch.arange(10).unsqueeze(0)
    with regard.record(model, keep="values") as recording:
        logits = model(ids)
    one, other = (recording.attribute(logits[0, -1, token]).map(0).dense() for token in (3, 7))
    both = recording.attribute(logits[0, -1, 3] - logits[0, -1, 7]).map(0).dense()
    assert (both - (one - other)).abs().max() < EQUAL


def test_layers_that_were_left_out_are_said_to_be_left_out():
    model = regard.GPT2(regard.GPT2Config(layers=2, heads=2, width=8, context=12, vocabulary=30)).double()
    with regard.record(model, keep="values") as recording:
        number = model(torch.arange(10).unsqueeze(0))[0, -1, 3]
    found = recording.attribute(number, layers=[1])
    with pytest.raises(ConfigError, match="leave out layers="):
        found.relevance()
    with pytest.raises(ConfigError, match="leave out layers="):
        found.map(0)


def test_layers_are_numbered_in_the_run_that_the_number_depends_on():
    config = regard.GPT2Config(layers=2, heads=2, width=8, context=12, vocabulary=30)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.models = torch.nn.ModuleList([regard.GPT2(config).double() for _ in range(2)])

        def forward(self, n, ids):
            return self.models[n](ids)

    model, ids = Two(), torch.arange(10).unsqueeze(0)
    with regard.record(model, keep="values") as recording:
        numbers = [model(n, ids)[0, -1, 3] for n in range(2)]
    assert len(recording.runs) == 2
    for number in numbers:
        expected = recording.attribute(number).map(1).dense()
        assert (recording.attribute(number, layers=[1]).map(1).dense() - expected).abs().max() < EQUAL
    with pytest.raises(ConfigError, match="must be below 2"):
        recording.attribute(numbers[0], layers=[2])


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_number_of_an_earlier_forward_has_the_maps_of_that_forward(layers):
    model = regard.GPT2(regard.GPT2Config(layers=2, heads=2, width=8, context=12, vocabulary=30)).double()
    texts = torch.arange(10).unsqueeze(0), torch.arange(20, 27).unsqueeze(0)
    with regard.record(model, keep="values") as recording:
        logits = [model(ids) for ids in texts]
    for ids, answer in zip(texts, logits, strict=True):
        with regard.record(model, keep="values") as alone:
            number = model(ids)[0, -1, 3]
        expected = alone.attribute(number).map(1).dense()
        found = recording.attribute(answer[0, -1, 3], layers=layers)
        assert found.map(1).shape == expected.shape
        assert expected.abs().max() > 0
        assert (found.map(1).dense() - expected).abs().max() < EQUAL
        if layers is None:
            assert (found.relevance() - alone.attribute(number).relevance()).abs().max() < EQUAL


def test_what_has_no_gradient_is_refused_in_a_sentence():
    model = regard.GPT2(regard.GPT2Config(layers=1, heads=2, width=8, context=12, vocabulary=30))
    ids = torch.arange(10).unsqueeze(0)
    with regard.record(model) as without:
        logits = model(ids)
    with pytest.raises(ConfigError, match="keep='values'"):
        without.attribute(logits[0, -1, 3])
    with torch.no_grad(), regard.record(model, keep="values") as frozen:
        plain = model(ids)
    with pytest.raises(ConfigError, match=r"outside torch.no_grad\(\)"):
        frozen.attribute(plain[0, -1, 3])
    with regard.record(model, keep="values") as recording:
        logits = model(ids)
    for wrong in (logits, logits[0, -1], 3.0, ids[0, 0]):
        with pytest.raises(ConfigError, match="a tensor of one number"):
            recording.attribute(wrong)
    with pytest.raises(ConfigError, match="does not depend"):
        recording.attribute(next(model.parameters()).sum())
    attribution = recording.attribute(logits[0, -1, 3])
    with pytest.raises(regard.ConfigError, match="kind"):
        attribution.map(0, kind="weight")


@pytest.mark.parametrize("attention", ["self", "cross"])
@pytest.mark.parametrize("queries", [7, -8, [0, 7], [1.5], "last", [True]])
def test_queries_that_are_not_there_have_no_relevance(attention, queries):
    model = bart()
    with regard.record(model, keep="values") as recording:
        number = model(input_ids=words(1, 9), decoder_input_ids=words(1, 7)).logits[0, -1, 3]
    with pytest.raises(ConfigError, match="queries"):
        recording.attribute(number).relevance(queries, attention=attention)


def test_a_layer_whose_queries_and_keys_differ_has_no_relevance():
    class Halves(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x[:, :, :3], x, x)

    layer = Halves()
    with regard.record(layer, keep="values") as recording:
        output = layer(torch.randn(1, 2, 6, 4, requires_grad=True))
    attribution = recording.attribute(output.sum())
    assert attribution.map(0, attention=recording.calls[0].kind).shape == (1, 2, 3, 6)
    with pytest.raises((ConfigError, ShapeError), match="relevance needs"):
        attribution.relevance()


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_a_cut_is_what_the_last_layer_does_when_an_edge_is_cut():
    """After the last layer's attention of GPT-2 without its MLP and norm, the number is linear in the context."""
    model = gpt2()
    block = model.transformer.h[-1]
    block.mlp = torch.nn.Identity()
    block.ln_2 = torch.nn.Identity()
    model.transformer.ln_f = torch.nn.Identity()
    tokens = words(1, 9)
    with Widened(), regard.record(model, keep="values") as recording:
        number = model(tokens).logits[0, -1, 3]
    cuts = recording.attribute(number).map(2, kind="cut")
    for head, query, key in ((0, 8, 3), (1, 8, 8), (3, 8, 0), (2, 5, 1)):
        with Widened(), torch.no_grad(), regard.intervene(model, regard.CutEdges(query, key, layer=2, head=head)):
            change = float(model(tokens).logits[0, -1, 3]) - float(number.detach())
        assert float(cuts[0, head, query, key]) == pytest.approx(change, abs=1e-9)
    assert float(cuts[0, 0, 8, 3]) != 0
    assert float(cuts[0, 2, 5, 1]) == 0


@pytest.mark.usefixtures("in_float64", "float64_models")
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_layer_that_a_change_computes_anew_has_its_gradients(is_inside):
    model, tokens = gpt2(), words(2, 11)
    with regard.record(model, keep="values") as recording:
        expected = recording.attribute(model(tokens).logits[:, LAST].sum())
    change = regard.intervene(model, regard.Temperature(1, t=1.0))  # which changes no number
    before, after = (change, contextlib.nullcontext()) if is_inside else (contextlib.nullcontext(), change)
    with before, regard.record(model, keep="values") as changed, after:
        found = changed.attribute(model(tokens).logits[:, LAST].sum())
    for layer in range(3):
        dense = expected.map(layer).dense()
        assert dense.any()
        assert float((found.map(layer).dense() - dense).abs().max()) < EQUAL * float(dense.abs().max())
