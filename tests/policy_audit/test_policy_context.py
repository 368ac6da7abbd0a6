"""The context under a policy by compiled passes is that of `attention` with the policy's mask in float64."""

import pytest
import torch

import regard
from bounds import gamma, unit_roundoff
from policy_audit.small_models import LAYERS, PROMPT, draw_tokens, make_model
from regard import Causal, Window
from regard.policies import (
    H2O,
    AttentionInputs,
    BlockSparse,
    DuoAttention,
    Knorm,
    Oracle,
    Quest,
    SnapKV,
    StreamingLLM,
    VerticalSlash,
)
from regard.policy_audit import apply_policy, measure_downstream
from regard.policy_audit.policy_context import compute_policy_context

pytest.importorskip("numba", reason="numba is not installed")

POLICIES = [
    StreamingLLM(2, 20),
    H2O(30),
    SnapKV(40, 16),
    DuoAttention(((0, 1),), 2, 20),
    Oracle(13),
    Oracle(40),
    Quest(16, 8),
    Quest(48, 8),
    BlockSparse(48, 16),
    VerticalSlash(9, 13, 16),
]
MODELS = {
    "plain": {},
    "capped": {"softcap": 3.0, "scale": 0.7},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
    "window": {"mask": Causal() & Window(left=41)},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_the_context_is_that_of_the_formula_within_the_bound(policy, kind):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 211, width, generator=generator) for heads, width in ((6, 7), (2, 7), (2, 5)))
    inputs = AttentionInputs(q=q, k=k, v=v, prompt=131, **MODELS[kind])
    mask = policy.choose_keys(inputs)
    found = compute_policy_context(inputs, mask)
    settings = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in MODELS[kind].items() if name != "mask"}
    expected = regard.attention(q.double(), k.double(), v.double(), inputs.mask & mask, **settings)
    scores = float((q.abs() @ k.abs().repeat_interleave(3, 1).mT).max()) * inputs.build_map().planes.request.scale
    rounding = 4 * (gamma(torch.float32, 7 + 4) * scores + gamma(torch.float32, 211) + 8 * unit_roundoff(torch.float32))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=rounding * float(v.abs().max()))


@pytest.mark.parametrize("policy", [Knorm(5), Quest(8, 4)], ids=lambda policy: policy.label)
def test_a_model_in_float32_gets_this_context(policy, monkeypatch):
    model, tokens, contexts = make_model(dtype=torch.float32), draw_tokens(), []
    compute = apply_policy.compute_policy_context

    def change_context(inputs, mask):
        contexts.append(compute(inputs, mask))
        return contexts[-1] * 2

    (expected,) = measure_downstream(model, tokens, [policy], prompt=PROMPT)
    monkeypatch.setattr(apply_policy, "compute_policy_context", change_context)
    (found,) = measure_downstream(model, tokens, [policy], prompt=PROMPT)
    assert len(contexts) == LAYERS
    assert found.residual[0] != expected.residual[0]
