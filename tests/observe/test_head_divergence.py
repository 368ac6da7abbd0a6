import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import sum_bound, unit_roundoff
from dense import close
from regard.observe.head_divergence import jensen_shannon


def compute_divergence(p, q):
    """½ KL(p | m) + ½ KL(q | m), with what is missing of 1 as one more key."""
    p, q = ([*x, max(0.0, 1 - math.fsum(x))] for x in (p, q))
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return sum(w / 2 * math.log(w / m) for x in (p, q) for w, m in zip(x, middle, strict=True) if w)


@given(st.integers(1, 7), st.integers(0, 2**31))
def test_the_divergence_is_its_definition(k, seed):
    torch.manual_seed(seed)
    p, q = torch.rand(2, k, dtype=torch.float64).mul(torch.rand(2, k) > 0.3) / k
    close(jensen_shannon(p, q), compute_divergence(p.tolist(), q.tolist()), atol=1e-12)
    assert jensen_shannon(p, q) == jensen_shannon(q, p)


def test_equal_rows_are_0_apart_and_rows_without_a_common_key_log_2():
    p, q = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 0.5, 0.5]], dtype=torch.float64)
    assert jensen_shannon(p, p) == 0
    assert float(jensen_shannon(p, q)) == pytest.approx(math.log(2), rel=1e-9)
    assert float(jensen_shannon(p, torch.zeros_like(p))) == pytest.approx(math.log(2), rel=1e-9)  # a blind row


def test_small_differences_are_not_lost_in_float32():
    torch.manual_seed(0)
    p = torch.rand(2000, dtype=torch.float64).softmax(-1)
    q = (p.log() + 1e-4 * torch.randn(2000)).softmax(-1)
    exact = compute_divergence(p.tolist(), q.tolist())
    tilt = 0.5e-4  # (p - q) / (p + q), whose square is left of terms that are as large as it and rounded, 16 times in all
    rounded = 16 * unit_roundoff(torch.float32) / tilt
    assert float(jensen_shannon(p.float(), q.float())) == pytest.approx(exact, rel=rounded)


@pytest.mark.parametrize("k", [7, 1000, 100_000, 1_000_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_whose_total_was_summed_in_another_order_lacks_nothing(k, seed):
    scores = torch.randn(k, generator=torch.Generator().manual_seed(seed))
    exponentials = (scores - scores.max()).exp()
    one_by_one = float(np.cumsum(exponentials.numpy(), dtype=np.float32)[-1])
    p, q = exponentials / one_by_one, exponentials / exponentials.sum(dtype=torch.float64).float()
    off = sum_bound(torch.float32, k + 10)  # of each weight, so that p / m is 1 + off / 2
    assert float(jensen_shannon(p, q)) <= off**2 + unit_roundoff(torch.float32) ** 2 * k


@pytest.mark.parametrize("k", [7, 1000, 100_000])
def test_what_a_sink_took_is_one_more_key(k):
    scores = torch.randn(k, dtype=torch.float64)
    sink = float(scores.logsumexp(0)) - 5
    weights = torch.cat([scores, torch.tensor([sink], dtype=torch.float64)]).softmax(0)
    p, q = weights[:-1], scores.softmax(0)
    exact = compute_divergence(weights.tolist(), [*q.tolist(), 0.0])
    close(jensen_shannon(p, q), exact, atol=1e-12)
    assert float(jensen_shannon(p.float(), q.float())) == pytest.approx(exact, rel=sum_bound(torch.float32, k + 10) / 0.006)
