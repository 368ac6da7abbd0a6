"""Each layer of a model is compared with its rule: what is seen too much, what is hidden wrongly, and in words of rules."""

import pytest
import torch
from torch import nn

import regard
from examination.whole_models import T, gpt2, kinds, read_intent, seeing
from observe import models as others
from regard import Causal, Documents, Everything, Prefix, Window
from regard.errors import ConfigError

NEAR = Causal() & Window(7)
IDS = torch.arange(34).view(2, 17) % 13 + 50


def model_of(*masks, context=19):
    """A model whose layers see what the masks show."""
    model = gpt2(layers=len(masks), context=context)
    for block, mask in zip(model.blocks, masks, strict=True):
        seeing(block.attention, mask)
    return model


@pytest.mark.parametrize("sample", [None, IDS, {"tokens": IDS}], ids=["default", "ids", "mapping"])
@pytest.mark.parametrize("mask", [NEAR, Causal(), Causal() & Window(8), Causal() & Window(6), Causal() & Window(2)], ids=str)
def test_a_window_of_another_length_is_found_with_any_sample(mask, sample):
    report = regard.examine(model_of(mask, mask, mask), expects=NEAR, sample=sample)
    if mask == NEAR:
        assert report, str(report)
        return
    (finding,) = report.findings
    assert finding.kind == "wrong mask"
    assert f"; expected {NEAR}, found {mask}, in layers 0 to 2" in finding.evidence
    assert finding.layers == tuple(f"blocks.{n}.attention" for n in range(3))
    assert read_intent(finding) == mask


@pytest.mark.parametrize(
    "sample", [{}, {"sample": IDS[:, :T]}, {"sample": {"tokens": IDS[:, :T]}}], ids=["context", "ids", "mapping"]
)
def test_with_too_few_tokens_to_show_a_window_the_report_is_inconclusive(sample):
    report = regard.examine(model_of(NEAR, context=T), expects=NEAR, **sample)
    assert report.is_inconclusive
    assert report.missing[0].needs == "sample= of at least 9 tokens"
    rule = Causal() & Window(7) & Documents([0] * 6 + [1] * 6)
    report = regard.examine(model_of(rule), expects=rule, sample=IDS[:1, :12])
    assert report.is_inconclusive
    assert "a document of at least 9 tokens" in report.missing[0].needs


@pytest.mark.parametrize(
    ("masks", "rules", "told"),
    [
        ([Everything(), Window(2, 2), Window(2, 2)], Everything(), "found Window(left=2, right=2), in layers 1 and 2"),
        ([Causal(), Causal() | Prefix(3)], Causal(), "found Causal() | Prefix(n=3)"),
        ([Causal(), NEAR], {"*.1.*": Causal() & Window(9), "*": Causal()}, f"expected {Causal() & Window(9)}, found {NEAR}"),
    ],
    ids=str,
)
def test_the_rules_that_the_cure_states_turn_the_report_true(masks, rules, told):
    model = model_of(*masks)
    (finding,) = regard.examine(model, expects=rules).findings
    assert told in finding.evidence
    assert regard.examine(model, expects=read_intent(finding))


def test_chunks_are_told_as_documents_of_their_tokens():
    chunks = Causal() & Documents(torch.arange(T) // 4)
    finding = regard.examine(model_of(Causal(), chunks), sample=IDS[:, :T]).findings[0]
    assert f"found Causal() & Documents(torch.arange({T}) // 4)" in finding.evidence


def test_a_window_that_is_lost_at_greater_length_is_found_there():
    class Lost(Window):
        def can_see(self, b, h, i, j, offset=0):
            near = super().can_see(b, h, i, j, offset)
            return near | (j < 2) & (i > 100)

    model = model_of(Causal() & Lost(7), NEAR, context=512)
    (finding,) = regard.examine(model, expects=NEAR).findings
    assert finding.evidence.startswith("with 129 tokens blocks.0.attention: row 101 puts")
    assert regard.examine(model_of(NEAR, NEAR, context=512), expects=NEAR)


def test_a_leak_is_of_the_future_only_where_the_rule_hides_it():
    assert kinds(regard.examine(model_of(Window(3, 3)), expects=Window(2, 2))) == ["wrong mask"]
    assert kinds(regard.examine(model_of(Window(7, 1)), expects=NEAR)) == ["future leak"]
    report = regard.examine(regard.attention, expects=Window(2, 2))
    assert "future leak" not in kinds(report)
    assert "wrong mask" in kinds(report)


def test_patterns_must_fit_the_layers():
    model = model_of(Causal(), NEAR)
    assert regard.examine(model, expects={"*.1.*": NEAR, "*": Causal()})
    for rules, told in (
        ({"*.1.*": NEAR}, "no pattern of expects matches blocks.0.attention"),
        ({"*.2.*": NEAR, "*": Causal()}, "the pattern '*.2.*' of expects matches no attention layer"),
        ({"*": Causal(), "*.1.*": NEAR}, "comes after others that match its layers: put it first"),
        ({}, "expects maps patterns of layer names to masks"),
    ):
        with pytest.raises(ConfigError) as error:
            regard.examine(model, expects=rules)
        assert told in str(error.value)
    with pytest.raises(ConfigError, match="for a module"):
        regard.examine(regard.attention, expects={"*.0": NEAR, "*": Causal()})


@pytest.mark.parametrize("sample", [None, torch.randn(2, 12, 24)], ids=["default", "vectors"])
def test_layers_of_a_module_of_vectors_have_rules_of_their_own(sample):
    class Stack(nn.Module):
        def __init__(self, *masks):
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.masks = nn.ModuleList(nn.MultiheadAttention(24, 4, batch_first=True) for _ in masks), masks

        def forward(self, x):
            for layer, mask in zip(self.layers, self.masks, strict=True):
                x = x + layer(x, x, x, attn_mask=~mask.table(x.shape[1], x.shape[1]))[0]
            return x

    rules = {"layers.0": Causal() & Window(3), "*": Causal()}
    assert regard.examine(Stack(*rules.values()), expects=rules, sample=sample)
    (finding,) = regard.examine(Stack(Causal() & Window(2), Causal()), expects=rules, sample=sample).findings
    assert finding.layer == "layers.0"


class Smoothed(nn.Module):
    """A norm that also subtracts a part of the mean over all tokens."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x - 0.1 * x.mean(1, keepdim=True))


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_a_leak_outside_of_attention_is_found_with_a_mapping_as_the_sample(name):
    model, ids = others.llama(), others.words(1, 12)
    tokens = ids if name == "input_ids" else model.get_input_embeddings()(ids).detach()
    sample = {name: tokens, "position_ids": torch.tensor([[*range(6), *range(6)]]), "use_cache": False}
    rule = Causal() & Documents([0] * 6 + [1] * 6)
    assert regard.examine(model, sample=sample, expects=rule)
    layer = model.model.layers[0]
    layer.post_attention_layernorm = Smoothed(layer.post_attention_layernorm)
    (finding,) = regard.examine(model, sample=sample, expects=rule).findings
    assert finding.evidence.endswith("the first module whose output changes there is model.layers.0.post_attention_layernorm")
