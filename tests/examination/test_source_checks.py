"""Keys and values are followed to the argument that they come from."""

import pytest
import torch
from torch import nn

from examination.right_variants import Cross, DecoderBlock
from examination.wrong_sources import C, CrossIgnored, CrossKeysOfItself, CrossOfItself, KeyOfQuery
from regard import Causal, Everything, examine
from regard.examination.source_checks import WHAT

X, CONTEXT = torch.randn(2, 6, C), torch.randn(2, 7, C)


@pytest.mark.parametrize("sample", [(X, CONTEXT), {"x": X, "context": CONTEXT}])
def test_cross_attention_is_checked_by_position_and_by_name(sample):
    report = examine(Cross(), expects=Everything(), sample=sample)
    assert report, str(report)
    assert WHAT in [one.what for one in report.checked]
    finding = examine(CrossOfItself(), expects=Everything(), sample=sample).findings[0]
    assert finding.kind == "wrong roles"
    assert "depends on context" in finding.evidence
    assert "k = to_k(context)" in finding.cure


def test_keys_of_the_wrong_sequence_are_named_though_the_output_depends_on_both():
    finding = examine(CrossKeysOfItself(), expects=Everything(), sample=(X, X + 1)).findings[0]
    assert finding.evidence == "in the layer values depend on context, but keys do not"


def test_the_layer_that_ignores_its_memory_is_named_and_one_that_reads_it_is_not():
    assert examine(DecoderBlock(), sample=(X, CONTEXT))
    assert examine(CrossIgnored(), sample=(X, CONTEXT)).findings[0].layer == "cross_attn"


def test_arguments_query_key_and_value_are_told_apart_with_different_sequences():
    class Right(KeyOfQuery):
        def sources(self, query, key, value):
            return query, key, value

    torch.manual_seed(0)
    assert WHAT in [one.what for one in examine(Right(), expects=Everything()).checked]
    assert examine(KeyOfQuery(), expects=Everything()).findings[0].kind == "wrong roles"


def test_a_module_of_two_sequences_needs_no_sample():
    assert WHAT in [one.what for one in examine(Cross(), expects=Everything()).checked]
    assert examine(CrossOfItself(), expects=Everything()).findings[0].kind == "wrong roles"
    assert examine(DecoderBlock())


def test_a_mask_is_no_source():
    class Masked(Cross):
        def forward(self, x, context_mask):
            return super().forward(x, x) + 0 * context_mask

    report = examine(Masked(), expects=Everything(), sample=(X, torch.ones(2, 6, 1)))
    assert not report.findings, str(report)


def test_a_module_of_one_sequence_yields_nothing():
    report = examine(nn.MultiheadAttention(C, 4, batch_first=True), expects=Causal())
    assert not report.findings
