"""Keys and values are followed to the argument that they come from."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from examination.right_variants import Cross, DecoderBlock
from examination.wrong_sources import C, CrossKeysOfItself, CrossOfItself, KeyOfQuery, join, split
from regard import Everything, examine
from regard.examination.call_checks.source_checks import WHAT

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


class Named(Cross):
    """Cross attention of sequences a and b, which make queries, keys and values as `roles` states."""

    def __init__(self, roles):
        super().__init__()
        self.roles = roles

    def attend(self, a, b):
        q, k, v = (f(a if role == "a" else b) for f, role in zip((self.to_q, self.to_k, self.to_v), self.roles, strict=True))
        return self.to_out(join(F.scaled_dot_product_attention(split(q), split(k), split(v))))

    def forward(self, x, latents):
        return self.attend(x, latents)


class Short(Named):
    def forward(self, x, ctx):
        return self.attend(x, ctx)


class MemoryFirst(Named):
    def forward(self, memory, x):
        return self.attend(memory, x)


SAME = {"expects": Everything(), "sample": (X, X.roll(1, 1) * 0.9)}


@pytest.mark.parametrize("made", [Named, Short, MemoryFirst])
@pytest.mark.parametrize(("roles", "unused"), [("aaa", 1), ("bbb", 0)])
def test_a_sequence_that_nothing_depends_on_is_found_whatever_its_name(made, roles, unused):
    finding = examine(made(roles), **SAME).findings[0]
    name = list(inspect.signature(made.forward).parameters)[unused + 1]
    assert finding.kind == "wrong roles"
    assert f"depends on {name}" in finding.evidence
    assert "no output depends on it" in finding.evidence


@pytest.mark.parametrize(("made", "roles"), [(Named, "abb"), (Short, "abb"), (MemoryFirst, "baa")])
def test_cross_attention_of_sequences_of_any_names_is_checked(made, roles):
    report = examine(made(roles), **SAME)
    assert report, str(report)
    assert WHAT in [one.what for one in report.checked]


@pytest.mark.parametrize("roles", ["baa", "aab", "aba"])
def test_other_roles_are_a_finding_of_a_named_source_and_unknown_of_another_name(roles):
    assert examine(Short(roles), **SAME).findings[0].kind == "wrong roles"
    report = examine(Named(roles), **SAME)
    assert not report.findings
    assert any(one.what.startswith("whether latents is used in its role") for one in report.unknown)
