"""Sequences of a batch that see one another are found."""

import pytest
import torch
from torch import nn

import lectures_classes
from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later
from regard import Everything, Padding
from regard.examination.probes.batch import check_case


class Exchanged(Layer):
    """Batch and tokens exchanged, as where (t, b, c) is expected."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Reshaped(Layer):
    """Tokens put where sequences stand."""

    def forward(self, x):
        b, t, c = x.shape
        return super().forward(x.reshape(t, b, c)).reshape(b, t, -1)


class Averaged(Layer):
    """Something of all sequences added to each."""

    def forward(self, x):
        return super().forward(x - 1e-4 * x.mean(0, keepdim=True))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(14, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("layer", [Exchanged(hiding(later)), Reshaped(hiding(later)), Averaged(hiding(later)), Wrapped()])
def test_a_batch_leak_is_found(layer):
    (finding,) = check_case(case_of(layer, sample=torch.randn(2, 5, 14 if isinstance(layer, Wrapped) else D_IN)))
    assert finding.kind == "batch leak"
    assert "of sequence" in finding.evidence


@pytest.mark.parametrize(
    "layer", [Layer(hiding(later)), nn.MultiheadAttention(14, 2), nn.MultiheadAttention(14, 2, batch_first=True)]
)
def test_sequences_that_do_not_see_one_another_are_no_finding(layer):
    assert kinds(check_case(case_of(layer))) == []


class PlacedInBatch(Layer):
    """A row of a table for each sequence, by its place in the batch."""

    def __init__(self, weights):
        super().__init__(weights)
        self.register_buffer("rows", torch.randn(64, D_IN))

    def forward(self, x):
        return super().forward(x + 0.1 * self.rows[: len(x), None])


def test_positions_along_the_batch_are_found():
    (finding,) = check_case(case_of(PlacedInBatch(hiding(later))))
    assert finding.kind == "wrong positions"
    assert "the same sequence gives other outputs in another place of its batch" in finding.evidence


def test_one_sequence_is_not_enough():
    (unknown,) = check_case(case_of(Layer(hiding(lambda q, k: torch.arange(k) >= 3)), Padding((3,)), torch.randn(1, 5, D_IN)))
    assert "two sequences" in unknown.needs


def test_nothing_is_said_of_what_takes_one_sequence():
    assert list(check_case(case_of(lectures_classes.SelfAttentionV1(D_IN, 5), Everything()))) == []
