"""The certificate of an audit: rows computed anew in float64, and what is wrong is seen in it."""

import importlib

import pytest
import torch

import regard
from bounds import gamma, unit_roundoff
from policy_audit.small_models import HEADS, LAYERS, PROMPT, draw_tokens, make_model, record, record_layer
from regard import Causal, Window
from regard.policies import (
    H2O,
    TOVA,
    BlockSparse,
    Knorm,
    Oracle,
    Quantised,
    Quest,
    StreamingLLM,
    VerticalSlash,
)

POLICIES = [
    StreamingLLM(2, 5),
    H2O(7),
    Knorm(5),
    Oracle(4),
    Quest(8, 4),
    BlockSparse(8, 4),
    VerticalSlash(3, 2, 5),
    Quantised(3, 4),
]


def draw_layer(tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, tokens, width, generator=generator).to(dtype) for heads, width in ((6, 7), (2, 7), (2, 5))]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"softcap": 3.0, "scale": 0.7},
        {"sinks": torch.linspace(-2, 2, 6, dtype=torch.float64)},
        {"mask": Causal() & Window(left=19)},
        {"bias": torch.linspace(-1, 1, 6 * 71, dtype=torch.float64).view(1, 6, 1, 71)},
    ],
    ids=["plain", "softcap", "sinks", "window", "bias"],
)
def test_all_rows_of_an_audit_in_float64_are_those_of_the_certificate(model):
    policies = [one for one in POLICIES if "bias" not in model or not isinstance(one, H2O)]
    found = regard.audit(record_layer(*draw_layer(71), **model), policies, prompt=40, certified_rows=71).certificate
    assert (found.rows, found.exact, found.wrong_counts) == (len(policies) * 6 * 71, True, 0)
    assert max(found.recall, found.kl, found.output_error) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [90, 128])
def test_the_certificate_of_compiled_passes_is_within_the_bound_of_float32(prompt):
    t = 181
    q, k, v = draw_layer(t, torch.float32, 3)
    found = regard.audit(record_layer(q, k, v), POLICIES, prompt=prompt, certified_rows=t).certificate
    scores = float((q.abs() @ k.abs().repeat_interleave(3, 1).mT).max()) * 7**-0.5
    rounding = 4 * (gamma(torch.float32, 7 + 4) * scores + gamma(torch.float32, t) + 8 * unit_roundoff(torch.float32))
    context = regard.attention(q, k, v, Causal())
    spread = float(v.norm(dim=-1).max() / context.norm(dim=-1).min())
    assert found.wrong_counts == 0
    assert 0 < found.recall <= rounding
    assert 0 < found.kl <= rounding
    assert 0 < found.output_error <= 2 * rounding * (1 + spread) * spread


@pytest.mark.parametrize("t", [65, 181, 2049])
def test_a_text_that_is_all_prompt_keeps_every_key_of_a_cache(t):
    policies = [H2O(7), TOVA(7), Knorm(5), Oracle(4), Quest(8, 4)]
    found = regard.audit(record_layer(*draw_layer(t, torch.float32)), policies, prompt=t)
    assert found.recall.eq(1).all()
    assert found.kept[:, 0, 0, 0].eq(torch.arange(1, t + 1)).all()
    assert found.certificate.wrong_counts == 0


def test_some_rows_are_checked_by_default_and_the_last_one_among_them(monkeypatch):
    audit_module = importlib.import_module("regard.policy_audit.audit")  # whose name is also the function's
    measure = audit_module.measure_layer

    def change_last_rows(inputs, policies):
        found, masks = measure(inputs, policies)
        found.recall[1, ..., -1] -= 0.25
        found.kl[0, ..., -1] += 0.125
        found.output_error[0, 1, 2, -1] += 0.0625
        found.kept[1, 0, :, -1] += 1
        return found, masks

    monkeypatch.setattr(audit_module, "measure_layer", change_last_rows)
    found = regard.audit(record(make_model(), draw_tokens()), [Knorm(5), Oracle(4)], prompt=PROMPT).certificate
    assert (found.rows, found.exact) == (2 * LAYERS * 2 * HEADS * 8, False)
    assert (found.recall, found.kl, found.output_error) == pytest.approx((0.25, 0.125, 0.0625), rel=1e-9)
    assert found.wrong_counts == HEADS * LAYERS
    assert f"{HEADS * LAYERS} keep another number of keys; recall differs by at most 2.5e-01" in found.sentence
