import itertools

import pytest
import torch

from regard import Causal, Window, attend
from regard.examination.identify.variants import (
    RIGHT,
    ProjectedInputs,
    compute_context,
    find_blind_queries,
    iterate_single_deviations,
    list_choices,
)
from regard.mechanism import heads

B, T, H, G, D, E = 2, 5, 6, 2, 7, 3


def draw_inputs(groups=G, rule=None, **options):
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, width, dtype=torch.float64) for width in (H * D, groups * D, groups * E))
    seen = (rule or Causal()).table(T, T)[None, None]
    return ProjectedInputs(q, k, v, q, H, groups, seen, D**-0.5, **options)


@pytest.mark.parametrize("groups", [1, G, H])
@pytest.mark.parametrize("rule", [Causal(), Window(1, 2)])
def test_the_right_variant_is_attention(groups, rule):
    given = draw_inputs(groups, rule)
    q, k, v = heads.split(given.q, H), heads.split(given.k, groups), heads.split(given.v, groups)
    torch.testing.assert_close(compute_context(RIGHT, given), heads.join(attend(q, k, v, rule).context))


@pytest.mark.parametrize("groups", [G, H])
def test_no_single_deviation_gives_what_the_right_one_or_another_does(groups):
    given = draw_inputs(groups)
    found = {
        one: compute_context(one, given) for one in (RIGHT, *iterate_single_deviations(list_choices(given, True, False, False)))
    }
    assert len(found) > 30
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        seen = ~(find_blind_queries(one, given) | find_blind_queries(other, given)).expand(B, T)
        same = first.shape == second.shape and (first - second)[seen].abs().max() < 1e-6
        assert not same, (one, other)
