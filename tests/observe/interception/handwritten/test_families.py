"""Families of transformers whose attention is written out by hand are recorded as the attentions that they hand out."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import BloomConfig, BloomForCausalLM

from observe.eager_weights import are_equal, run
from observe.families import TEXT
from observe.family import ANY, B, Family, T, Widened, tokens
from observe.handwritten_families import HAND, SINGLE, UNCOMPARED, UNSOFTENED, compare_with_attentions, compare_with_own_weights
from observe.handwritten_media_families import KERNELS
from observe.parametrized_families import parametrize_families
from observe.recording_checks import EQUAL
from regard import KnockOut, intervene, record

UNNAMED = ("levit", "wavtokenizer", "groupvit")  # whose modules are numbered, not named
ROUNDED = 1e-5  # of a model that computes in float32, from its own weights


def draw_words_on_page(config, side="none"):
    """Words, where each of them stands on a page, and a picture of the page."""
    corners = torch.randint(0, 500, (B, T, 2))
    boxes = torch.cat([corners, corners + torch.randint(1, 500, (B, T, 2))], -1)
    return {**tokens(config, side), "bbox": boxes, "image": torch.randn(B, 3, 16, 16)}


LAYOUT = Family(
    "layoutlmv2",
    "LayoutLMv2Model",
    {**TEXT, "coordinate_size": 8, "shape_size": 8, "image_feature_pool_shape": [2, 2, 6], "max_2d_position_embeddings": 1024},
    draw_words_on_page,
    ANY,
)


class Backbone(nn.Module):
    """A convolution in place of the network of detectron2, which does not attend."""

    def __init__(self, config):
        super().__init__()
        self.cfg = SimpleNamespace(MODEL=SimpleNamespace(PIXEL_MEAN=[0.0] * 3, PIXEL_STD=[1.0] * 3))
        self.pixel_mean, self.pixel_std = nn.Buffer(torch.zeros(3, 1, 1)), nn.Buffer(torch.ones(3, 1, 1))
        self.convolution = nn.Conv2d(3, config.image_feature_pool_shape[2], 8, 8)

    def forward(self, images):
        return self.convolution(images).flatten(2).transpose(1, 2)


@parametrize_families(HAND + KERNELS)
def test_every_layer_is_recorded_and_the_output_is_the_same_to_the_bit(family):
    model = family.build()
    for side in family.sides:
        given = family.feed(model, side)
        plain, _ = run(model, given)
        inside, recording = run(model, given, recorded=True)
        assert are_equal(plain, inside)
        assert recording.calls
        assert not recording.missed
        assert family.name in UNNAMED or all("att" in name for name in recording.names)


@parametrize_families([one for one in HAND if one.name not in UNCOMPARED])
def test_the_maps_are_the_attentions_that_the_model_hands_out(family):
    for side in family.sides:
        maps, difference = compare_with_attentions(family, side)
        assert maps > 0
        assert difference < (ROUNDED if family.name in SINGLE else EQUAL), side


@parametrize_families([*KERNELS, *(one for one in HAND if one.name in UNCOMPARED and one.name not in UNSOFTENED)])
def test_the_maps_are_softmaxes_that_the_model_computes(family):
    for side in family.sides:
        maps, difference = compare_with_own_weights(family, side)
        assert maps > 0
        assert difference < (ROUNDED if family.name in SINGLE else EQUAL), side


@pytest.mark.slow
def test_attention_to_the_other_picture_is_cross_attention_though_its_module_is_called_self():
    family = next(one for one in HAND if one.name == "superglue")
    model = family.build()
    _, recording = run(model, family.feed(model), recorded=True)
    assert [(call.name, call.kind) for call in recording.calls] == [
        (f"gnn.layers.{n}.attention.self", kind) for n, kind in enumerate(model.config.gnn_layers_types)
    ]


@pytest.mark.slow
def test_the_maps_of_layoutlmv2_are_the_attentions_that_it_hands_out(monkeypatch):
    import transformers.models.layoutlmv2.modeling_layoutlmv2 as modeling

    monkeypatch.setattr(modeling, "LayoutLMv2VisualBackbone", Backbone)
    monkeypatch.setattr(modeling, "requires_backends", lambda *_: None)
    monkeypatch.setattr(modeling, "detectron2", SimpleNamespace(layers=SimpleNamespace(FrozenBatchNorm2d=())), raising=False)
    for side in LAYOUT.sides:
        maps, difference = compare_with_attentions(LAYOUT, side)
        assert maps == LAYOUT.settings["num_hidden_layers"]
        assert difference < EQUAL, side


def build_bloom() -> nn.Module:
    torch.manual_seed(5)
    return BloomForCausalLM(BloomConfig(hidden_size=24, n_layer=2, n_head=2, vocab_size=31)).eval()


def test_a_head_that_is_knocked_out_adds_nothing():
    model, ids = build_bloom().double(), torch.randint(31, (1, T))
    with intervene(model, KnockOut(layer=0, head=1)):
        logits = model(ids).logits
    with torch.no_grad():
        model.transformer.h[0].self_attention.dense.weight[:, 12:] = 0
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=EQUAL)


class SoftmaxGradients(TorchFunctionMode):
    """Keeps every softmax with its gradient."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "softmax":
            result.retain_grad()
            self.weights.append(result)
        return result


def test_the_pull_is_weight_times_gradient():
    model, ids = build_bloom().double(), torch.randint(31, (1, T))
    with Widened(), record(model, keep="values") as recording:
        attribution = recording.attribute(model(ids).logits[0, -1, 3])
    with Widened(), SoftmaxGradients() as dense:
        model(ids).logits[0, -1, 3].backward()
    for layer, weights in enumerate(dense.weights):
        expected = (weights * weights.grad).view(1, 2, T, T)
        torch.testing.assert_close(attribution.map(layer, kind="pull").dense(), expected, rtol=0, atol=EQUAL)


def test_a_generation_with_a_cache_is_stitched_to_one_map():
    model = build_bloom()
    ids = torch.randint(1, 31, (1, T))
    with record(model) as recording:
        longer = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with record(model) as whole:
        model(longer[:, :-1])
    assert not recording.missed
    assert len(recording.runs) == 1
    for layer in range(2):
        assert recording.map(layer).shape == whole.map(layer).shape
        torch.testing.assert_close(recording.map(layer).dense(), whole.map(layer).dense(), rtol=1e-4, atol=1e-6)
