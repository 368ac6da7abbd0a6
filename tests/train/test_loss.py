import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, cross_entropy_bounds
from regard import Documents
from regard.models import GPT2, GPT2Config
from regard.text.corpus import TokenBatch
from regard.train.loss import NO_TARGET, WARM, RunningLoss, compute_loss, count_targets, find_fault

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


def test_half_precision_logits_are_raised_before_the_loss():
    model = gpt2(dtype=torch.bfloat16).eval()
    targets = batch().targets.flatten()
    with torch.no_grad():
        found, logits = compute_loss(model, batch()), model(batch().tokens).double().flatten(0, 1)
    assert found.dtype == torch.float32
    allowed, _ = cross_entropy_bounds(torch.float32, logits, targets, terms=B * T + 1)
    assert_within(found, torch.nn.functional.cross_entropy(logits, targets), allowed / (B * T))


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


USUAL = [2.0 + 0.1 * (-1) ** n for n in range(WARM)]  # a deviation of 0.1


def make_running_loss(losses) -> RunningLoss:
    running = RunningLoss()
    for loss in losses:
        running = running.add_loss(loss)
    return running


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_skipped_from_the_first_step_on(bad):
    assert "the loss is" in find_fault(bad, 1.0, RunningLoss(), 0.0)
    assert "the gradient is" in find_fault(1.0, bad, RunningLoss(), 0.0)
    assert find_fault(1.0, 1e30, RunningLoss(), 0.0) is None


def test_a_spike_is_some_deviations_above_the_mean():
    running = make_running_loss(USUAL)
    assert find_fault(2.79, 1.0, running, 8.0) is None
    assert "the loss is 2.81, but the running mean is 2" in find_fault(2.81, 1.0, running, 8.0)
    assert find_fault(2.81, 1.0, running, 9.0) is None
    assert find_fault(1e9, 1.0, running, 0.0) is None
    assert find_fault(-1e9, 1.0, running, 8.0) is None


def test_skipped_batches_are_counted_in_a_row_and_leave_the_mean_alone():
    running = make_running_loss(USUAL).add_skipped_batch().add_skipped_batch()
    assert (running.skipped, running.mean, running.count) == (2, make_running_loss(USUAL).mean, WARM)
    assert running.add_loss(2.0).skipped == 0
