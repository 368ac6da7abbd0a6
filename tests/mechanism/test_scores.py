import math

import pytest
import torch

from regard.mechanism import scores

B, H, Q, K, D = 2, 3, 5, 7, 11


def test_dot_is_the_sum_of_products_of_each_query_with_each_key():
    q, k = torch.randn(B, H, Q, D, dtype=torch.float64), torch.randn(B, H, K, D, dtype=torch.float64)
    expected = [[[[sum(q[b, h, i] * k[b, h, j]) for j in range(K)] for i in range(Q)] for h in range(H)] for b in range(B)]
    torch.testing.assert_close(scores.dot(q, k), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(("scale", "factor"), [(None, 1 / math.sqrt(D)), (0.3, 0.3), (0.0, 0.0)])
def test_scaled_dot_divides_by_the_root_of_the_width_unless_told_otherwise(scale, factor):
    q, k = torch.randn(Q, D, dtype=torch.float64), torch.randn(K, D, dtype=torch.float64)
    torch.testing.assert_close(scores.scaled_dot(q, k, scale), scores.dot(q, k) * factor)


@pytest.mark.slow
def test_scaling_keeps_the_variance_of_scores_near_one_at_any_width():
    torch.manual_seed(0)
    n = 2048
    for d in (16, 256, 1024):
        q, k = torch.randn(n, d), torch.randn(n, d)
        # the variance of n x n scores is tr(QᵀQ KᵀK) / (n² d), of standard error √(4 / (n d) + 2 / n²)
        allowed = 5 * math.sqrt(4 / (n * d) + 2 / n**2)
        assert abs(scores.scaled_dot(q, k).var().item() - 1) < allowed
        assert abs(scores.dot(q, k).var().item() / d - 1) < allowed


def test_additive_scores_are_the_formula_of_bahdanau():
    q, k, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, Q, D), (B, K, D), (D,)))
    found = scores.additive(q, k, weight)
    for b in range(B):
        for i in range(Q):
            for j in range(K):
                expected = sum(weight[n].item() * math.tanh(q[b, i, n] + k[b, j, n]) for n in range(D))
                assert found[b, i, j].item() == pytest.approx(expected, abs=1e-12)
