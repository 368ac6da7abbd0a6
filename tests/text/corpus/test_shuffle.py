import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regard.text.corpus.shuffle import shuffle_places


def order(count, seed, epoch):
    return shuffle_places(np.arange(count), count, seed, np.full(count, epoch)).tolist()


@given(st.integers(1, 700), st.integers(0, 2**63), st.integers(0, 2**40))
def test_every_place_goes_to_another_and_each_is_reached(count, seed, epoch):
    assert sorted(order(count, seed, epoch)) == list(range(count))


@given(st.integers(1, 300), st.integers(0, 99), st.lists(st.tuples(st.integers(0, 299), st.integers(0, 9)), min_size=1))
def test_where_a_place_goes_does_not_depend_on_the_rest_of_the_batch(count, seed, asked):
    places, epochs = np.array([(place % count, epoch) for place, epoch in asked]).T
    together = shuffle_places(places, count, seed, epochs).tolist()
    assert together == [order(count, seed, epoch)[place] for place, epoch in zip(places, epochs, strict=True)]


def test_epochs_and_seeds_are_shuffled_differently():
    orders = {tuple(order(23, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_each_place_is_as_likely_as_another_to_go_anywhere():
    for count in (2, 3, 5, 17):
        rounds = 4000
        places, epochs = np.tile(np.arange(count), rounds), np.repeat(np.arange(rounds), count)
        table = np.zeros((count, count))
        np.add.at(table, (places, shuffle_places(places, count, 7, epochs)), 1)
        expected = rounds / count
        chi = ((table - expected) ** 2 / expected).sum() * (count - 1) / count  # rows and columns have their sums
        freedom = (count - 1) ** 2
        assert chi < freedom + 5 * (2 * freedom) ** 0.5  # five deviations


def test_neighbours_do_not_stay_together():
    gaps = np.diff(order(10_007, 0, 0))
    assert (gaps == 1).mean() < 0.001
    assert abs(np.corrcoef(np.arange(10_007), order(10_007, 0, 0))[0, 1]) < 0.05
