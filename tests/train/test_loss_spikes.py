import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.train.loss_spikes import LEAST, SPAN, WARM, RunningLoss, find_fault

USUAL = [2.0 + 0.1 * (-1) ** n for n in range(WARM)]  # a deviation of 0.1


def after(losses) -> RunningLoss:
    running = RunningLoss()
    for loss in losses:
        running = running.add_loss(loss)
    return running


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=SPAN))
def test_at_first_the_mean_and_the_deviation_are_the_plain_ones(losses):
    running = after(losses)
    assert running.mean == pytest.approx(statistics.fmean(losses), abs=1e-9)
    assert running.variance == pytest.approx(statistics.pvariance(losses), abs=1e-9)


def test_later_they_forget():
    assert after([5.0] * 200 + [2.0] * 1000).mean == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_skipped_from_the_first_step_on(bad):
    assert "the loss is" in find_fault(bad, 1.0, RunningLoss(), 0.0)
    assert "the gradient is" in find_fault(1.0, bad, RunningLoss(), 0.0)
    assert find_fault(1.0, 1e30, RunningLoss(), 0.0) is None


def test_a_spike_is_some_deviations_above_the_mean():
    running = after(USUAL)
    assert find_fault(2.79, 1.0, running, 8.0) is None
    assert "the loss is 2.81, but the running mean is 2" in find_fault(2.81, 1.0, running, 8.0)
    assert find_fault(2.81, 1.0, running, 9.0) is None
    assert find_fault(1e9, 1.0, running, 0.0) is None
    assert find_fault(-1e9, 1.0, running, 8.0) is None


def test_nothing_is_a_spike_at_first_nor_where_the_loss_stood_still():
    assert find_fault(99.0, 1.0, after(USUAL[:-1]), 8.0) is None
    still = after([0.01] * 200)
    assert find_fault(0.01 + 0.99 * LEAST, 1.0, still, 8.0) is None
    assert find_fault(0.02 + LEAST, 1.0, still, 8.0)


def test_skipped_batches_are_counted_in_a_row_and_leave_the_mean_alone():
    running = after(USUAL).add_skipped_batch().add_skipped_batch()
    assert (running.skipped, running.mean, running.count) == (2, after(USUAL).mean, WARM)
    assert running.add_loss(2.0).skipped == 0
