"""Whatever is recorded of attention that is written out by hand gives back what the module returned: never a wrong map."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from observe.interception.handwritten.test_chains import (
    BENT,
    OF_VALUES,
    PRODUCTS,
    SCORES,
    SOFTMAXES,
    STEPS,
    Chain,
    D,
    T,
    some,
)
from regard.observe import record


@pytest.mark.slow
@settings(max_examples=250)
@given(
    scores=st.sampled_from(sorted(SCORES)),
    before=some((STEPS.keys() | BENT.keys()) - {"rounded"}, 3),
    softmax=st.sampled_from(sorted(SOFTMAXES)),
    after=some(STEPS.keys() - {"dropped", "rounded"}, 3),
    of_values=some(OF_VALUES.keys() - {"dropped", "rounded"}, 2),
    product=st.sampled_from(sorted(PRODUCTS)),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    seed=st.integers(0, 2**16),
)
def test_a_recorded_chain_gives_its_output(scores, before, softmax, after, of_values, product, batch, seed):
    torch.manual_seed(seed)
    chain = Chain(scores, before, softmax, after, of_values, product)
    model, x = nn.Sequential(chain), torch.randn(*batch, T, D, dtype=torch.float64)
    torch.manual_seed(3)
    with torch.no_grad():
        plain = model(x)
    torch.manual_seed(3)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"), record(model, keep="values") as recording:
        output = model(x)
    assert torch.equal(plain.nan_to_num(), output.nan_to_num())
    assert recording.calls or {one.module for one in recording.missed} == {"0"}
    if len(recording.calls) == 1 and not recording.missed and not any("gate" in note for note in recording.notes):
        kind = recording.calls[0].kind
        context = recording.map(0, kind=kind).dense() @ recording.values(0, kind=kind)
        rows = output.isfinite().all(-1)
        assert context.numel() == output.numel()
        context = context.reshape(output.shape)
        if softmax in ("exponentials", "logarithms"):  # which may be divided by their sums after the product
            context = context * ((output * context).sum(-1, keepdim=True) / (context * context).sum(-1, keepdim=True))
        assert torch.allclose(context[rows], output[rows], rtol=1e-10, atol=1e-10)
