"""LeGrad and Chefer's relevance beside the authors' scripts, on dense eager attention of a vision transformer and BERT.

The package legrad_torch, beside which test_legrad_package.py stands, wraps open_clip's models alone; its computation
(legrad/wrapper.py, compute_legrad_clip) is written out here for others: the gradient of each layer's score with respect to the
stored attention, its positive part, the means over heads and queries, without the token of the class, the sum over layers,
scaled to 0 to 1. Chefer's is that of the notebooks of Transformer-MM-Explainability (generate_relevance):
R += mean((gradient * A)+) R.
"""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import regard
from bounds import gamma
from observe.family import Widened
from regard.errors import ConfigError

EQUAL = 1e-10  # float64
LAYERS, H, WIDTH, CLASSES, B, CLASS = 3, 4, 32, 5, 2, 3
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": H, "intermediate_size": 40}


def make_vit(implementation):
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, image_size=20, patch_size=4, num_labels=CLASSES, initializer_range=0.3)
    config._attn_implementation = implementation
    model = ViTForImageClassification(config).double().eval()
    return model, {"pixel_values": torch.randn(B, 3, 20, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def make_bert(implementation):
    torch.manual_seed(0)
    config = BertConfig(**SIZES, vocab_size=60, num_labels=CLASSES, initializer_range=0.3)
    config._attn_implementation = implementation
    ids = torch.randint(3, 60, (B, 17), generator=torch.Generator().manual_seed(1))
    return BertForSequenceClassification(config).double().eval(), {"input_ids": ids}


def apply_vit_head(model, hidden):
    return model.classifier(model.vit.layernorm(hidden)[:, 0])


def apply_bert_head(model, hidden):
    return model.classifier(model.bert.pooler(hidden))


MODELS = {"vit": (make_vit, apply_vit_head), "bert": (make_bert, apply_bert_head)}


def measure(output):
    return output.logits[:, CLASS]


def run_eager(name):
    """The eager model, what it returned, and its attention and hidden states with their graph."""
    model, inputs = MODELS[name][0]("eager")
    with Widened():
        return model, model(**inputs, output_attentions=True, output_hidden_states=True)


def compute_legrad_densely(name):
    """The maps of each layer (b, layers, t), and the merged one without the token of the class, as the authors' script."""
    model, output = run_eager(name)
    maps = []
    for attention, hidden in zip(output.attentions, output.hidden_states[1:], strict=True):
        score = MODELS[name][1](model, hidden)[:, CLASS].sum()
        (gradient,) = torch.autograd.grad(score, [attention], retain_graph=True)
        maps.append(gradient.clamp(min=0).mean(dim=1).mean(dim=1))
    merged = sum(one[:, 1:] for one in maps)
    low, high = merged.amin(1, keepdim=True), merged.amax(1, keepdim=True)
    return torch.stack(maps, 1), (merged - low) / (high - low)


@pytest.mark.parametrize("name", MODELS)
def test_legrad_is_that_of_the_authors_script_on_dense_attention(name):
    expected, merged = compute_legrad_densely(name)
    model, inputs = MODELS[name][0]("sdpa")
    found = regard.legrad(model, inputs, measure)
    assert found.numbers == tuple(range(LAYERS))
    for layer in range(LAYERS):
        assert float((found.scores[:, layer] - expected[:, layer]).abs().max()) < EQUAL * float(expected[:, layer].max())
        assert float(expected[:, layer].max()) > 0
    assert float((found.merge(slice(1, None)) - merged).abs().max()) < EQUAL
    last = regard.legrad(model, inputs, measure, layers=[LAYERS - 1])
    assert torch.equal(last.scores[:, 0], found.scores[:, -1])


@pytest.mark.parametrize("name", MODELS)
def test_relevance_is_that_of_the_authors_script_on_dense_attention(name):
    _, output = run_eager(name)
    expected = torch.eye(output.attentions[0].shape[-1], dtype=torch.float64).expand(B, -1, -1)
    for attention in output.attentions:
        (gradient,) = torch.autograd.grad(measure(output).sum(), [attention], retain_graph=True)
        expected = expected + (gradient * attention).clamp(min=0).mean(dim=1).detach() @ expected
    model, inputs = MODELS[name][0]("sdpa")
    with regard.record(model, keep="values") as recording:
        number = measure(model(**inputs)).sum()
    found = recording.attribute(number).relevance(0)
    assert float((found - expected[:, 0]).abs().max()) < EQUAL * float(expected.max())


def test_the_model_is_left_as_it_was():
    model, inputs = make_vit("sdpa")
    model.requires_grad_(False).train()
    before = {name: (set(vars(module)), len(module._forward_hooks)) for name, module in model.named_modules()}
    regard.legrad(model, inputs, measure)
    assert {name: (set(vars(module)), len(module._forward_hooks)) for name, module in model.named_modules()} == before
    assert model.training
    assert not any(one.requires_grad or one.grad is not None for one in model.parameters())


def test_keys_that_a_number_in_the_bias_hides_do_not_count():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(hidden_size=WIDTH, n_layer=2, n_head=H, vocab_size=60, initializer_range=0.3)).eval()
    ids = torch.randint(3, 60, (B, 13), generator=torch.Generator().manual_seed(1))
    is_token = torch.arange(13) >= torch.tensor([[0], [5]])
    inputs = {"input_ids": ids, "attention_mask": is_token.long()}
    found = regard.legrad(model, inputs, lambda output: output.logits[:, -1, CLASS])
    assert not found.scores[1, :, :5].any()
    output = model(**inputs, output_attentions=True)
    (gradient,) = torch.autograd.grad(output.logits[:, -1, CLASS].sum(), [output.attentions[1]])
    expected = gradient.clamp(min=0).where(output.attentions[1] > 0, 0).mean((1, 2), dtype=torch.float64)
    bound = 2 * gamma(torch.float32, WIDTH + 60) * float(gradient.abs().max())  # products of a head's width, and the sums
    assert float((found.scores[:, 1] - expected).abs().max()) < bound


@pytest.mark.parametrize("some", [slice(None), slice(1, None)])
def test_a_padded_text_has_the_merged_scores_that_it_has_alone(some):
    model, inputs = make_bert("sdpa")
    ids, length = inputs["input_ids"], 11
    inputs["attention_mask"] = (torch.arange(17) < torch.tensor([[17], [length]])).long()
    merged = regard.legrad(model, inputs, measure).merge(some)
    alone = regard.legrad(model, {"input_ids": ids[1:, :length]}, measure).merge(some)
    assert float((merged[1:, : alone.shape[1]] - alone).abs().max()) < EQUAL
    assert not merged[1, alone.shape[1] :].any()
    whole = regard.legrad(model, {"input_ids": ids[:1]}, measure).merge(some)
    assert float((merged[:1] - whole).abs().max()) < EQUAL


def test_what_has_no_blocks_or_no_gradient_is_refused():
    layer = regard.MultiHeadAttention(8, 8, 12, 0.0, 2)
    with pytest.raises(ConfigError, match="in no block of its own"):
        regard.legrad(layer, torch.randn(B, 7, 8), lambda output: output.sum())
    swin = SwinForImageClassification(
        SwinConfig(image_size=16, patch_size=2, embed_dim=12, depths=[2, 2], num_heads=[2, 4], window_size=4)
    )
    with pytest.raises(ConfigError, match="different shapes"):
        regard.legrad(swin, torch.randn(B, 3, 16, 16), measure)
    model, inputs = make_vit("sdpa")
    with pytest.raises(ConfigError, match="no gradient"):
        regard.legrad(model, inputs, lambda output: output.logits.detach()[:, 0])
    with pytest.raises(ConfigError, match="measure must give"):
        regard.legrad(model, inputs, lambda output: output.logits)
    with pytest.raises(ConfigError, match="a layer"):
        regard.legrad(model, inputs, measure, layers=["0"])
