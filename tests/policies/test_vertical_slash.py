"""VerticalSlash reads the columns and the diagonals with the largest sums of the weights of the last queries."""

import pytest

from policies.plain import B, G, P, R, T, best, dense_weights, make_inputs, table
from regard import ConfigError
from regard.policies import VerticalSlash


def test_a_query_of_the_prompt_reads_the_columns_and_the_diagonals():
    inputs, vertical, slash, last = make_inputs(), 4, 3, 5
    weights, found = dense_weights(inputs), table(VerticalSlash(vertical, slash, last), inputs)
    for b in range(B):
        for h in range(G * R):
            rows = range(P - last, P)
            columns = best([sum(float(weights[b, h, i, j]) for i in rows) for j in range(P)], vertical)
            sums = [sum(float(weights[b, h, i, i - d]) for i in rows if i >= d) for d in range(1, P)]
            distances = {0} | {d + 1 for d in best(sums, slash - 1)}
            for i in range(P):
                expected = {j for j in range(i + 1) if j in columns or i - j in distances}
                assert set(found[b, h, i].nonzero().flatten().tolist()) == expected
            for i in range(P, T):
                assert found[b, h, i].sum() == i + 1


@pytest.mark.parametrize("settings", [{"vertical": 0}, {"slash": 0}, {"last": 0}])
def test_counts_are_at_least_one(settings):
    with pytest.raises(ConfigError, match="VerticalSlash"):
        VerticalSlash(**settings)


def test_the_prompt_has_the_queries_that_are_summed():
    with pytest.raises(ConfigError, match="at least 64"):
        VerticalSlash().choose_keys(make_inputs())
