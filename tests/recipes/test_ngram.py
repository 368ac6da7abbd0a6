import itertools
import math

import numpy as np
import pytest
from recipes.pocket.ngram import KneserNey

VOCABULARY = 7


def tokens(count=5000):
    return np.random.default_rng(0).zipf(1.5, count) % VOCABULARY


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_after_any_history_seen_or_not_the_probabilities_sum_to_one(n):
    model = KneserNey.train(tokens(700), n, VOCABULARY)
    for history in itertools.islice(itertools.product(range(VOCABULARY), repeat=n - 1), 0, None, 5):
        each = [math.exp(-model.compute_mean_nats(np.array([*history, word]))) for word in range(VOCABULARY)]
        assert sum(each) == pytest.approx(1, abs=1e-12)


def test_longer_histories_help_where_text_has_a_pattern_and_do_little_harm_where_it_has_none():
    pattern = np.tile([0, 1, 2, 3, 1, 4], 500)
    assert KneserNey.train(pattern, 3, VOCABULARY).compute_mean_nats(pattern) < 0.01
    assert KneserNey.train(pattern, 1, VOCABULARY).compute_mean_nats(pattern) > 1
    seen, new = tokens(20_000)[:15_000], tokens(20_000)[15_000:]
    assert (
        KneserNey.train(seen, 5, VOCABULARY).compute_mean_nats(new)
        < KneserNey.train(seen, 1, VOCABULARY).compute_mean_nats(new) + 0.1
    )


def test_a_shorter_order_counts_the_words_that_stood_before_and_not_how_often():
    # 2 follows many words once each, 3 follows one word many times: after an unseen history 2 is likelier
    text = np.array([1, 3] * 50 + [w for other in (0, 4, 5, 6) for w in (other, 2)])
    model = KneserNey.train(text, 2, VOCABULARY)
    assert model.compute_mean_nats(np.array([2, 2])) < model.compute_mean_nats(np.array([2, 3]))
