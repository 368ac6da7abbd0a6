"""Inputs that a subject takes are found, and are the same every time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lectures_classes
from examination.subjects import D_IN, Layer, case_of, hiding, later
from regard import (
    BareSelfAttention,
    CausalAttention,
    Everything,
    MultiHeadAttention,
    Padding,
    SelfAttention,
    StackedHeads,
)
from regard.examination.subject.inputs import RefusedError


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (SelfAttention(7, 5), 7),
        (BareSelfAttention(5, 7), 5),
        (BareSelfAttention(7, 5), 7),
        (CausalAttention(11, 3, 13, 0.0), 11),
        (StackedHeads(7, 3, 13, 0.0, 2), 7),
        (MultiHeadAttention(5, 14, 13, 0.0, 2), 5),
        (nn.MultiheadAttention(14, 2), 14),
        (nn.TransformerEncoderLayer(14, 2, 17), 14),
        (nn.Sequential(nn.LayerNorm(7), Layer(hiding(later))), 7),
    ],
)
def test_the_width_is_found_from_the_parameters(layer, width):
    assert case_of(layer, Everything()).shapes.width == width


def test_the_same_seed_gives_the_same_numbers_in_every_dtype():
    case = case_of(MultiHeadAttention(12, 12, 13, 0.0, 3))
    (x,), (y,) = case.make_inputs(5, 3, seed=4), case.double.make_inputs(5, 3, seed=4)
    assert x.shape == (3, 5, 12)
    assert y.dtype == torch.float64
    assert torch.equal(x, y.float())
    assert torch.equal(x, case.make_inputs(5, 3, seed=4)[0])
    assert not torch.equal(x, case.make_inputs(5, 3, seed=5)[0])


def test_a_sample_of_one_sequence_is_given_to_what_takes_one():
    case = case_of(lectures_classes.SelfAttentionV1(D_IN, 5), Everything(), torch.randn(4, D_IN))
    assert case.subject.rank == 2
    assert case.make_usual_inputs()[0].shape == (1, 4, D_IN)


def test_what_carries_its_own_padding_is_called_with_the_batch_of_its_sample():
    hidden = torch.arange(6) >= torch.tensor([[3], [5], [6]])
    layer = Layer(lambda scores: scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1))
    for sample in (torch.randn(3, 6, D_IN), None):
        case = case_of(layer, Padding((3, 5, 6)), sample)
        assert not case.can_resize
        assert case.make_inputs(4, 2)[0].shape == (3, 6, D_IN)


@pytest.mark.parametrize("length", [4, 16])
def test_a_length_that_a_layer_is_made_for_is_found(length):
    class Fixed(Layer):
        def __init__(self):
            super().__init__(hiding(later))
            self.register_buffer("mask", later(length, length))

        def forward(self, x):
            assert x.shape[1] == length
            return super().forward(x)

    assert case_of(Fixed()).shapes.tokens == length


class Blockwise(Layer):
    """A layer of blocks of eight tokens, one of whose properties raises."""

    def __init__(self):
        super().__init__(hiding(later))

    @property
    def dim(self):
        raise RuntimeError("not built")

    def forward(self, x):
        assert x.shape[1] % 8 == 0
        return super().forward(x)


def test_a_layer_of_blocks_is_given_whole_blocks():
    assert case_of(Blockwise()).shapes.tokens == 8


def raising(x):
    raise RuntimeError("view size is not compatible")


class Asserts(Layer):
    def forward(self, x):
        assert x.shape[1] > 1000


class Raises(Layer):
    def forward(self, x):
        raising(x)


@pytest.mark.parametrize(
    ("subject", "sure"),
    [(Raises(hiding(later)), True), (Asserts(hiding(later)), False), (raising, False), (nn.Embedding(5, 3), False)],
)
def test_where_nothing_is_taken_it_is_known_whether_the_inputs_were_right(subject, sure):
    with pytest.raises(RefusedError) as refused:
        case_of(subject)
    assert refused.value.sure is sure


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "changed",
    [
        lambda context: context[:, :1],  # heads are lost
        lambda context: torch.cat([context, context], 1),
        lambda context: context.mean(2, keepdim=True),
        lambda context: context.transpose(1, 2),  # (b, t, h, d)
        lambda context: context.transpose(1, 2).flatten(2),  # heads side by side
    ],
)
def test_a_function_that_runs_and_gives_no_context_is_not_called_with_fewer_axes(changed):
    with pytest.raises(RefusedError, match=r"returned .*; a context is a floating tensor \(2, 3, 6, c\)") as refused:
        case_of(lambda q, k, v: changed(causal(q, k, v)))
    assert not refused.value.sure
