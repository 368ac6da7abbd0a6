"""An examination ends when its time is over, with a report of what was examined until then."""

import math
import subprocess
import sys
import time

import pytest
import torch

import regard
from examination.subjects import CAUSAL, Layer, hiding, later
from examination.whole_models import Still, causal
from regard import ConfigError
from regard.examination.time_limit import TimeLimit, TimeLimitError

BLOCKED_SECONDS = 60  # that a subject would take


class Slow(Layer):
    """A right layer that takes its time where it has more than 6 tokens, and catches whatever it can."""

    def __init__(self, wait):
        super().__init__(hiding(later))
        self.wait = wait
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        if x.shape[1] > 6:
            self.wait()
        return super().forward(x)


def spin():
    """Never return, and never call anything that returns late."""
    while True:
        pass


def catch():
    """Catch what the limit raises, once."""
    end = time.monotonic() + BLOCKED_SECONDS
    try:
        spin()
    except BaseException:
        while time.monotonic() < end:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("wait", [spin, catch, lambda: time.sleep(0.3)])
def test_a_subject_that_does_not_return_is_a_finding_beside_what_was_checked(wait):
    layer = Slow(wait).train()
    began = time.monotonic()
    report = regard.examine(layer, time_limit_seconds=3)
    assert time.monotonic() - began < BLOCKED_SECONDS
    assert not report
    assert [one.kind for one in report.findings] == ["unfinished"]
    assert "the time limit of 3 s was reached" in report.findings[0].evidence
    assert layer.training
    assert layer.count == 0


def test_a_model_that_does_not_return_is_a_finding_too():
    class Endless(Still):
        def forward(self, ids):
            spin()

    assert [one.kind for one in regard.examine(Endless(causal), time_limit_seconds=0.2).findings] == ["unfinished"]


@pytest.mark.slow
def test_a_limit_that_is_reached_as_its_block_ends_is_never_raised_after_it():
    for _ in range(200):
        limit = TimeLimit(1e-4)
        try:
            with limit.enforce():
                time.sleep(1e-4)
        except TimeLimitError:
            limit.stop()
        sum(range(1000))  # where it would be raised


TRACED = """
import sys, time
from regard.examination.time_limit import TimeLimit, TimeLimitError

limit = TimeLimit({seconds})
try:
    with limit.enforce():
        time.sleep(0.05)
except TimeLimitError:
    limit.stop()
lines = 0

def see(frame, event, argument):
    global lines
    lines += event == "line"
    return see

def work():
    return sum(n for n in range(1000))

sys.settrace(see)
work()
sys.settrace(None)
print(lines)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60, 0.01])
def test_a_debugger_runs_after_a_limit_that_was_reached_or_not(seconds):
    program = [sys.executable, "-c", TRACED.format(seconds=seconds)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=BLOCKED_SECONDS)
    assert int(ran.stdout) > 1000


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "3", True])
def test_a_time_limit_is_a_positive_number(seconds):
    with pytest.raises(ConfigError, match=r"a time limit .* of seconds"):
        regard.examine(CAUSAL, time_limit_seconds=seconds)
