import copy
import math
import pickle

import pytest
import torch

from regard.observe.score_interval import (
    SEGMENTS,
    QueryScores,
    Score,
    compute_student_quantile,
    estimate_score,
    estimate_scores,
    estimate_share,
    wilson_interval,
)

TRIALS = 4000


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 31, 200])
def test_the_quantile_encloses_95_percent_of_students_density(freedom):
    """The density is summed over slices so thin that Simpson's rule has no error that matters."""
    t, slices = compute_student_quantile(freedom), 20_000
    x = torch.linspace(-t, t, 2 * slices + 1, dtype=torch.float64)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = (log_scale - (freedom + 1) / 2 * torch.log1p(x * x / freedom)).exp()
    weights = torch.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    assert float((density * weights).sum()) * (t / slices) / 3 == pytest.approx(0.95, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "queries"), [(3, 20), (8, 5), (1, 400)])
def test_the_interval_covers_the_true_mean_in_95_of_100_samples(documents, queries):
    """Scores drawn independently, one head for each trial; the deviation of the share is that of a binomial."""
    drawn = torch.rand(documents, TRIALS, queries, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = estimate_scores(QueryScores(drawn, torch.ones_like(drawn, dtype=torch.bool)))
    covered = sum(score.low <= 0.5 <= score.high for score in scores) / TRIALS
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / TRIALS))


def test_the_mean_is_over_documents_and_the_count_over_queries():
    values = torch.tensor([[[1.0, 2.0, 9.0]], [[4.0, 9.0, 9.0]], [[9.0, 9.0, 9.0]]])
    among = torch.tensor([[[True, True, False]], [[True, False, False]], [[False, False, False]]])
    (score,) = estimate_scores(QueryScores(values, among))
    assert score == (1.5 + 4) / 2
    assert score.count == 3
    half = compute_student_quantile(1) * 1.25  # two means, 1.5 and 4: their standard deviation / √2
    assert (score.low, score.high) == pytest.approx((2.75 - half, 2.75 + half))


def test_one_document_is_cut_into_segments_of_its_own_queries():
    values = torch.arange(32.0).view(1, 1, 32)
    among = values % 2 == 0
    (score,) = estimate_scores(QueryScores(values, among))
    means = [float(part.mean()) for part in values[among].tensor_split(SEGMENTS)]
    expected = estimate_score(means, [], 16)
    assert score == 15
    assert (score.low, score.high) == pytest.approx((expected.low, expected.high))


def test_without_two_queries_there_is_no_interval():
    one = QueryScores(torch.tensor([[[0.3, 0.4]]]), torch.tensor([[[True, False]]]))
    (score,) = estimate_scores(one)
    assert score == pytest.approx(0.3)
    assert math.isnan(score.low)
    assert score.count == 1
    (none,) = estimate_scores(QueryScores(one.values, torch.zeros(1, 1, 2, dtype=torch.bool)))
    assert math.isnan(none)
    assert none.to_dict() == {"mean": None, "low": None, "high": None, "count": 0}


def test_equal_scores_have_an_interval_of_no_width():
    (score,) = estimate_scores(QueryScores(torch.full((1, 1, 30), 0.25), torch.ones(1, 1, 30, dtype=torch.bool)))
    assert (score.low, score, score.high) == (0.25, 0.25, 0.25)


def test_limits_cut_the_interval_and_not_the_mean():
    assert estimate_score([0.0, 1.0], [], 2, (0.0, 1.0)).to_dict() == {"mean": 0.5, "low": 0.0, "high": 1.0, "count": 2}


def test_a_number_of_each_head_has_an_interval_over_documents_alone():
    several, single = estimate_scores(torch.tensor([[1.0], [2.0]])), estimate_scores(torch.tensor([[1.0]]))
    assert several[0].low < 1.5 < several[0].high
    assert math.isnan(single[0].low)


def test_a_score_is_copied_with_its_interval():
    score = Score(0.5, 0.4, 0.6, 7)
    for other in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert (other, other.low, other.high, other.count) == (0.5, 0.4, 0.6, 7)


def test_wilsons_ends_are_the_shares_from_which_the_hits_are_just_so_far():
    for hits, count in ((0, 10), (3, 10), (10, 10), (113, 200)):
        for end in wilson_interval(hits, count):
            apart = abs(hits / count - end)
            assert apart == pytest.approx(1.959964 * math.sqrt(max(end * (1 - end), 0) / count), abs=1e-7)


@pytest.mark.parametrize("count", [3, 8, 20, 57])
def test_the_interval_of_a_share_encloses_it_in_95_percent_of_all_samples(count):
    """Exact: over all numbers of hits, in the mean over shares from 0.01 to 0.99."""
    shares, enclosed = [n / 100 for n in range(1, 100)], []
    intervals = [estimate_share(hits, count) for hits in range(count + 1)]
    for share in shares:
        chances = [math.comb(count, hits) * share**hits * (1 - share) ** (count - hits) for hits in range(count + 1)]
        enclosed.append(sum(p for p, score in zip(chances, intervals, strict=True) if score.low <= share <= score.high))
    assert sum(enclosed) / len(enclosed) == pytest.approx(0.95, abs=0.01)
    assert [(score, score.count) for score in intervals] == [(hits / count, count) for hits in range(count + 1)]
