import pytest
import torch
from torch import nn

import lectures_classes
import regard
from examination.identify.cases import case_of, identify_subject, make_layer
from examination.identify.layers import (
    RIGHT,
    SINGLE,
    UNMASKED,
    C,
    H,
    Plain,
    make_later_table,
    nothing,
    roles,
    view_as_heads,
    wrong,
)
from regard import Causal, Everything, Padding, Window


def deviations(match):
    return None if match is None else match.variant.deviations


@pytest.mark.slow
@pytest.mark.parametrize("key", SINGLE, ids=str)
def test_each_mistake_is_named_and_no_other_formula_gives_its_outputs(key):
    match = identify_subject(make_layer(SINGLE[key]))
    assert deviations(match) == dict([key])
    assert match.error < 1e-12 < match.right_error
    assert match.heads == H
    assert {name for other in match.alike for name in other.deviations} <= {"mask"}


@pytest.mark.parametrize("key", UNMASKED, ids=str)
def test_each_mistake_of_a_layer_without_a_mask_is_named(key):
    assert deviations(identify_subject(make_layer(UNMASKED[key]), Everything())) == dict([key])


@pytest.mark.parametrize("layer", RIGHT, ids=lambda layer: layer.__name__)
def test_right_layers_of_every_layout_are_right_and_every_deviation_would_have_shown(layer):
    match = identify_subject(make_layer(layer))
    assert match.is_right
    assert match.error < 1e-12
    assert all(
        match.is_verified(field) for field in ("mask", "scale", "axis", "norm", "split", "merge", "share", "roles", "output")
    )


@pytest.mark.parametrize("h", [1, 2, 3, 4, 6, 12])
def test_the_number_of_heads_is_found_even_where_the_layer_states_another(h):
    layer = make_layer(Plain, C, h)
    assert identify_subject(layer).heads == h
    layer.n_heads = 5 - h
    assert identify_subject(layer).heads == h


@pytest.mark.parametrize(
    "layer",
    [
        lambda: lectures_classes.CausalAttention(5, 7, 11, 0.1),
        lambda: lectures_classes.MultiHeadAttentionWrapper(5, 7, 11, 0.1, 3),
        lambda: lectures_classes.MultiHeadAttention(C, C, 11, 0.1, 3, True),
        lambda: regard.CausalAttention(5, 7, 11, 0.1),
        lambda: regard.StackedHeads(5, 7, 11, 0.1, 3, True),
        lambda: regard.MultiHeadAttention(C, C, 11, 0.1, 3),
        lambda: nn.MultiheadAttention(C, H, batch_first=True),
        lambda: nn.MultiheadAttention(C, H, bias=False),
        lambda: Plain(24, 6, 2),
        lambda: Plain(24, 6, 1),
    ],
)
def test_layers_that_people_use_are_right(layer):
    assert identify_subject(make_layer(layer)).is_right


def test_attention_of_a_hugging_face_gpt2_is_right():
    pytest.importorskip("transformers")
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    torch.manual_seed(0)
    theirs = GPT2Attention(GPT2Config(n_embd=C, n_head=H, attn_implementation="eager"), layer_idx=0).eval()
    assert identify_subject(theirs, Everything()).is_right  # it is its model that hands it the mask


def test_a_function_is_right_and_its_mistakes_are_named():
    scaled = nn.functional.scaled_dot_product_attention
    assert identify_subject(lambda q, k, v: scaled(q, k, v, is_causal=True)).is_right
    assert deviations(identify_subject(lambda q, k, v: scaled(q, k, v))) == {"mask": "none"}
    assert deviations(identify_subject(lambda q, k, v: scaled(q, k, k), Everything())) == {"roles": "qkk"}
    sample = tuple(torch.randn(2, h, 5, 8, generator=torch.Generator().manual_seed(h)) for h in (6, 2, 2))
    tiled = lambda q, k, v: scaled(q, *(x.repeat(1, 3, 1, 1) for x in (k, v)))  # noqa: E731
    assert deviations(identify_subject(tiled, Everything(), sample=sample)) == {"share": "tiled"}


def test_fewer_queries_than_keys_are_identified():
    sample = tuple(torch.randn(2, 3, t, 8, generator=torch.Generator().manual_seed(t)) for t in (2, 5, 5))
    late = lambda q, k, v: regard.attention(q, k, v, Causal(), offset=3)  # noqa: E731
    assert identify_subject(late, sample=sample, offset=3).is_right
    early = lambda q, k, v: regard.attention(q, k, v, Causal())  # noqa: E731
    assert deviations(identify_subject(early, sample=sample, offset=3)) == {"mask": "measured"}


@pytest.mark.slow
def test_a_scale_without_a_name_is_measured():
    match = identify_subject(make_layer(wrong(scale=lambda self, scores, t: scores * 0.3)))
    assert list(match.variant.deviations) == ["scale"]
    assert match.scale == pytest.approx(0.3, rel=1e-6)


def test_a_stated_scale_is_the_right_one_and_the_usual_one_is_then_wrong():
    assert identify_subject(make_layer(SINGLE["scale", "none"]), scale=1.0).is_right
    assert deviations(identify_subject(make_layer(Plain), scale=1.0)) == {"scale": "head"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "both"),
    [
        (wrong(scale=nothing, mask=nothing), {"scale": "none", "mask": "none"}),
        (
            wrong(scale=nothing, mask=lambda self, s, t: s.masked_fill(make_later_table(t), 0)),
            {"scale": "none", "mask": "zero"},
        ),
        (
            wrong(split_heads=view_as_heads, join=lambda self, c: c.reshape(len(c), -1, self.c)),
            {"split": "qkv", "merge": "viewed"},
        ),
        (wrong(mask=nothing, softmax=lambda self, s: torch.softmax(s, 1)), {"axis": "heads", "mask": "none"}),
        (type("Both", (roles("q", "k", "k"),), {"scale": lambda self, s, t: s / self.d}), {"scale": "twice", "roles": "qkk"}),
    ],
)
def test_two_mistakes_at_once_are_named_both(layer, both):
    assert deviations(identify_subject(make_layer(layer))) == both


def test_a_window_where_causal_is_expected_leaves_everything_else_right():
    near = wrong(mask=lambda self, s, t: s.masked_fill(make_later_table(t) | torch.ones(t, t).tril(-3).bool(), -torch.inf))
    match = identify_subject(make_layer(near))
    assert deviations(match) == {"mask": "measured"}
    assert match.is_right
    assert match.is_verified("scale")
    assert identify_subject(make_layer(near), Window(2, 0)).variant == regard.examination.identify.variants.RIGHT


def test_padding_given_to_the_wrong_axis_is_named():
    class Padded(Plain):
        def mask(self, scores, t):
            real = torch.arange(t)[None] < torch.tensor([4, 6])[:, None]
            return scores.masked_fill(~real[:, None, :, None], -1e9)

    match = identify_subject(make_layer(Padded), Padding([4, 6]), sample=(torch.randn(2, 6, C),))
    assert deviations(match) == {"mask": "transposed"}


@pytest.mark.slow
def test_layers_outside_the_family_match_nothing():
    class Residual(Plain):
        def forward(self, x):
            return x + super().forward(x)

    capped = wrong(scale=lambda self, s, t: 2 * (s / 4).tanh())
    biased = wrong(mask=lambda self, s, t: (s - 0.3 * torch.arange(t)).masked_fill(make_later_table(t), -torch.inf))
    for layer in (Residual, capped, biased):
        assert identify_subject(make_layer(layer)) is None
    assert identify_subject(nn.TransformerEncoderLayer(C, H, batch_first=True).eval(), Everything()) is None


def test_what_is_right_at_one_length_alone_is_not_right():
    assert deviations(identify_subject(make_layer(SINGLE["scale", "tokens"], 18, 3))) == {
        "scale": "tokens"
    }  # d is 6, as are the tokens


def test_identification_draws_no_number_and_leaves_the_layer_as_it_was():
    layer = make_layer(Plain)
    before = {name: one.clone() for name, one in layer.state_dict().items()}
    state = torch.get_rng_state()
    assert case_of(layer, Causal()).match.is_right
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, before[name]) for name, one in layer.state_dict().items())
    assert all(one.grad is None for one in layer.parameters())
