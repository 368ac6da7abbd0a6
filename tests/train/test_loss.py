import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Documents
from regard.models import GPT2, GPT2Config
from regard.text.corpus import TokenBatch
from regard.train.loss import NO_TARGET, RunningLoss, compute_loss, count_targets, find_fault

B, T, N = 3, 11, 17


def gpt2(dropout=0.0, dtype=torch.float64) -> GPT2:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(layers=2, heads=2, width=10, context=13, vocabulary=N, dropout=dropout)).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model


def batch(seed=0, none=()) -> TokenBatch:
    dice = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(N, (2, B, T), generator=dice)
    documents = torch.randint(2, (B, T), generator=dice).cumsum(-1)
    for place in none:
        targets[place] = NO_TARGET
    return TokenBatch(tokens, targets, documents)


@given(st.integers(0, 9), st.sets(st.tuples(st.integers(0, B - 1), st.integers(0, T - 1)), max_size=B * T - 1))
def test_the_loss_is_the_mean_of_the_surprise_at_each_real_target(seed, none):
    model, read = gpt2().eval(), batch(seed, none)
    with torch.no_grad():
        found, logits = compute_loss(model, read), model(read.tokens)
    surprises = []
    for b in range(B):
        for t in range(T):
            if read.targets[b, t] != NO_TARGET:
                row = logits[b, t].tolist()
                whole = math.log(math.fsum(math.exp(x) for x in row))
                surprises.append(whole - row[read.targets[b, t]])
    assert count_targets(read) == len(surprises)
    assert float(found) == pytest.approx(math.fsum(surprises) / len(surprises), rel=1e-12)


def test_a_change_in_an_earlier_document_changes_no_logits_of_a_later_one():
    model, read = gpt2().eval(), batch()
    read.documents[:, :] = torch.tensor([0] * 5 + [1] * 6)
    other = read.tokens.clone()
    other[:, :5] = (other[:, :5] + 1) % N
    with torch.no_grad():
        one, two = (model(tokens, mask=Documents(read.documents)) for tokens in (read.tokens, other))
        assert torch.equal(one[:, 5:], two[:, 5:])
        assert not torch.equal(model(read.tokens)[:, 5:], model(other)[:, 5:])


def test_the_loss_hides_earlier_documents_where_it_is_asked_to():
    model, read = gpt2().eval(), batch()
    with torch.no_grad():
        logits = model(read.tokens, mask=Documents(read.documents))
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), read.targets.flatten())
        assert float(compute_loss(model, read, mask_documents=True)) == pytest.approx(float(expected), rel=1e-12)
        assert float(compute_loss(model, read)) != pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_skipped_from_the_first_step_on(bad):
    assert "the loss is" in find_fault(bad, 1.0, RunningLoss(), 0.0)
    assert "the gradient is" in find_fault(1.0, bad, RunningLoss(), 0.0)
    assert find_fault(1.0, 1e30, RunningLoss(), 0.0) is None
