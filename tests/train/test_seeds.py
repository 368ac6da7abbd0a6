import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.train.seeds import derive_seed, seed_generators

CPU = torch.device("cpu")


@given(st.tuples(*[st.integers(0, 10**6)] * 3), st.tuples(*[st.integers(0, 10**6)] * 3))
def test_two_steps_have_one_seed_only_where_they_are_one(one, other):
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)
    assert 0 <= derive_seed(*one) < 2**63


def test_a_step_draws_the_same_whatever_was_drawn_before_and_leaves_no_trace():
    found = []
    for n in range(2):
        torch.manual_seed(n)
        before = torch.get_rng_state()
        with seed_generators(3, 5, 0, CPU):
            found.append(torch.rand(7))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)
