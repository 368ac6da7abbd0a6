"""A bias by T5's buckets of distances is named with its numbers, as transformers' own function makes them."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5EncoderModel, T5Model
from transformers.models.t5.modeling_t5 import T5Attention

from examination.wrong_calls import C, H, Rotary
from regard import Causal, Everything
from regard.examination import examine
from regard.examination.call_reading.table_reading import BUCKETS, compute_buckets

find_buckets = T5Attention._relative_position_bucket
SETTINGS = [(32, 128), (16, 61), (48, 203), (64, 256), (31, 97)]
SIZES = {"vocab_size": 101, "d_model": C, "d_kv": C // H, "num_heads": H, "d_ff": 40, "num_layers": 2}


class Bucketed(Rotary):
    """Attention of a kernel with a number for each bucket of distances and head, which `bucket(distances)` chooses."""

    def __init__(self, bucket, count, is_causal, max_distance=None):
        super().__init__()
        self.bucket, self.is_causal = bucket, is_causal
        self.table = nn.Embedding(count, H)
        if max_distance is not None:
            self.max_distance = max_distance

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        distances = place - place[:, None]  # j - i
        bias = self.table(self.bucket(distances)).permute(2, 0, 1)
        if self.is_causal:
            bias = bias.masked_fill(distances > 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, bias)


def examine_buckets(bucket, count, is_causal, max_distance=None, sample=None):
    torch.manual_seed(0)
    layer = Bucketed(bucket, count, is_causal, max_distance)
    report = examine(layer, expects=Causal() if is_causal else Everything(), sample=sample)
    assert not report.findings
    return [one for one in report.checked if "T5" in one.what]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("count", "most"), SETTINGS)
def test_buckets_are_those_of_transformers(count, most, is_causal):
    distances = torch.arange(-509, 510)
    mine = compute_buckets(distances, count, torch.tensor(most), not is_causal)
    assert torch.equal(mine, find_buckets(distances, not is_causal, count, most))


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("count", "most"), SETTINGS)
def test_right_buckets_are_named_with_their_numbers(count, most, is_causal):
    (checked,) = examine_buckets(lambda x: find_buckets(x, not is_causal, count, most), count, is_causal, most)
    way = "causal" if is_causal else "bidirectional"
    assert checked.what == f"{BUCKETS}: num_buckets={count}, max_distance={most}, {way}"
    assert f"of {300 if is_causal else 599} distances" in checked.sensitivity


def move_edge(x):
    """T5's causal buckets of (16, 64), of which one of several distances begins one distance late."""
    buckets = find_buckets(x, False, 16, 64)
    edge = 11 + int((find_buckets(-torch.arange(11, 64), False, 16, 64).diff() > 0).int().argmax()) + 1
    return buckets - (x == -edge).long()


def start_late(x):
    """T5's buckets, with one single distance too few before those of several."""
    far, exact = x.abs(), 7
    steps = (far.clamp_min(1) / exact).log() / math.log(128 / exact) * 8
    return torch.where(far < exact, far, (exact + steps.long()).clamp_max(15)) + 16 * (x > 0)


WRONG = {
    "distances negated": (lambda x: find_buckets(-x, True, 32, 128), 32, False),
    "distances negated, causal": (lambda x: find_buckets(-x, False, 32, 128), 32, True),
    "one bucket's edge": (move_edge, 16, True),
    "one single distance too few": (start_late, 32, False),
    "buckets of equal width": (lambda x: (x.abs() // 9).clamp_max(15) + 16 * (x > 0), 32, False),
    "both directions alike": (lambda x: find_buckets(-x.abs(), False, 32, 128), 32, False),
    "the table from its end": (lambda x: 31 - find_buckets(x, True, 32, 128), 32, False),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_buckets_are_not_called_those_of_t5(name):
    bucket, count, is_causal = WRONG[name]
    assert not examine_buckets(bucket, count, is_causal, 128)


def test_the_buckets_of_transformers_own_layer_and_model_are_named():
    config = T5Config(**SIZES, relative_attention_num_buckets=24, relative_attention_max_distance=96)
    torch.manual_seed(0)
    for subject in (T5Attention(config, has_relative_attention_bias=True), T5EncoderModel(config)):
        report = examine(subject.eval(), expects=Everything(), scale=1)
        assert f"{BUCKETS}: num_buckets=24, max_distance=96, bidirectional" in [one.what for one in report.checked]


def test_the_tables_of_an_encoder_and_a_decoder_are_told_apart():
    torch.manual_seed(0)
    model = T5Model(T5Config(**SIZES, relative_attention_max_distance=96)).eval()
    ids = torch.randint(101, (1, 130), generator=torch.Generator().manual_seed(3))
    report = examine(model, expects=Everything(), scale=1, sample={"input_ids": ids, "decoder_input_ids": ids})
    named = [
        (one.what.rpartition(", ")[2], re.findall(r"(?:en|de)coder", one.sensitivity)[0])
        for one in report.checked
        if "T5" in one.what
    ]
    assert named == [("bidirectional", "encoder"), ("causal", "decoder")]


def test_a_table_that_an_encoder_shares_with_a_causal_layer_is_not_accused():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Bucketed(lambda x: find_buckets(x, True, 32, 128), 32, is_causal=False)
            self.second = Bucketed(lambda x: find_buckets(x, True, 32, 128), 32, is_causal=True)
            self.second.table = self.first.table

        def forward(self, x):
            return self.second(self.first(x))

    torch.manual_seed(0)
    assert not [one for one in examine(Both(), expects=Everything()).findings if one.kind == "wrong positions"]
