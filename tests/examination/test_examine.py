"""examine: right attention has no finding, wrong attention has the one that names it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lectures_classes
import regard
from examination.subjects import CAUSAL, D_IN, Layer, hiding, later
from regard import Causal, ConfigError, Everything, Padding, Window

RIGHT = [
    (regard.SimpleSelfAttention(), Everything()),
    (regard.BareSelfAttention(7, 5), Everything()),
    (regard.BareSelfAttention(768, 64), Everything()),
    (regard.SelfAttention(7, 5, True), Everything()),
    (regard.AdditiveAttention(7, 7, 5), Everything()),
    (regard.CausalAttention(7, 5, 13, 0.5), Causal()),
    (regard.StackedHeads(7, 3, 13, 0.5, 2), Causal()),
    (regard.MultiHeadAttention(7, 10, 13, 0.5, 2), Causal()),
    (regard.MultiHeadAttention(7, 10, 13, 0.5, 2).bfloat16(), Causal()),
    (regard.MultiHeadAttention(7, 10, 13, 0.5, 2).double(), Causal()),
    (lectures_classes.SelfAttentionV1(7, 5), Everything()),
    (lectures_classes.CausalAttention(7, 5, 6, 0.5), Causal()),
    (lectures_classes.MultiHeadAttentionWrapper(7, 5, 4, 0.5, 2), Causal()),
    (lectures_classes.MultiHeadAttention(7, 10, 13, 0.5, 2), Causal()),
    (nn.MultiheadAttention(14, 2), Causal()),
    (nn.MultiheadAttention(14, 2, dropout=0.5, batch_first=True, add_bias_kv=True, add_zero_attn=True), Window(2, 1)),
    (nn.TransformerEncoderLayer(14, 2, 17, batch_first=True), Causal()),
    (nn.TransformerEncoderLayer(14, 2, 17, norm_first=True), Everything()),
    (F.scaled_dot_product_attention, Everything()),
    (functools.partial(F.scaled_dot_product_attention, is_causal=True), Causal()),
    (functools.partial(regard.attention, mask=Padding((3, 5)), softcap=3.0, sinks=torch.ones(3)), Padding((3, 5))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "expects"), RIGHT)
def test_right_attention_has_no_finding(subject, expects):
    report = regard.examine(subject, expects=expects)
    assert report.ok, str(report)
    assert len(report.checked) >= 3


def test_the_lectures_leak_is_found_first_of_all():
    report = regard.examine(Layer(lambda scores: scores.tril().softmax(-1)))
    assert not report
    assert report.findings[0].kind == "future leak"


def test_a_leak_in_a_function_is_reported_with_its_size():
    report = regard.examine(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    assert "future leak" in [one.kind for one in report.findings]


def test_raising_on_its_own_sample_is_a_finding():
    class Viewed(Layer):
        def forward(self, x):
            return super().forward(x).transpose(1, 2).view(x.shape[0], x.shape[1], -1)

    for sample in (torch.randn(2, 6, D_IN), None):
        report = regard.examine(Viewed(hiding(later)), sample=sample)
        assert [one.kind for one in report.findings] == ["raises"]
        assert "view size is not compatible" in report.findings[0].evidence


@pytest.mark.parametrize("sample", [torch.randn(2, 6, D_IN), torch.randn(6, D_IN), (torch.randn(3, 4, D_IN),)])
def test_a_sample_may_be_of_one_sequence_or_of_several(sample):
    assert regard.examine(CAUSAL, sample=sample)


def test_a_sample_that_is_no_tensor_is_refused():
    with pytest.raises(ConfigError, match="each of which must be a tensor"):
        regard.examine(CAUSAL, sample=[[1.0, 2.0]])


def test_an_expectation_that_is_no_rule_is_refused():
    with pytest.raises(ConfigError, match="a mask must be a Mask"):
        regard.examine(CAUSAL, expects=Causal)


def test_a_failed_assertion_shows_the_finding():
    report = regard.examine(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    with pytest.raises(AssertionError, match=r"1 finding\. future leak: changing token"):  # as pytest writes it
        assert report


@pytest.mark.parametrize("scale", ["a", 0.0, float("nan")])
def test_a_scale_is_a_number(scale):
    with pytest.raises(ConfigError, match=r"^scale(, which multiplies the scores,)? must be (a number|finite)"):
        regard.examine(CAUSAL, scale=scale)


@pytest.mark.parametrize("shape", [(2, 0, D_IN), (0, 6, D_IN), (D_IN,)])
def test_a_sample_has_a_token(shape):
    with pytest.raises(ConfigError, match="with at least 1 token"):
        regard.examine(CAUSAL, sample=torch.zeros(shape))
