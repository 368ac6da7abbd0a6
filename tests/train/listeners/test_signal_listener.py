import os
import signal

import pytest

from regard.train import begin, follow
from regard.train.listeners.signal_listener import SignalListener
from train import small_runs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(folder, tmp_path, number):
    training, signals = (
        begin(small_runs.config(folder, out=str(tmp_path), checkpoint_every=0, evaluate_every=0)),
        SignalListener(),
    )
    before = signal.getsignal(number)

    def sends(training, report):
        if report.step == 2:
            os.kill(os.getpid(), number)

    with signals.catch_signals():
        follow(training, [signals, sends])
    assert signal.getsignal(number) == before
    assert signals.came == number
    assert training.stopped == signals.came.name
    assert training.checkpoints.read_latest().step == training.step == 3


@pytest.mark.slow
def test_a_second_one_ends_it_at_once(folder, tmp_path):
    training, signals = begin(small_runs.config(folder, out=str(tmp_path), checkpoint_every=1)), SignalListener()

    def sends(training, report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with signals.catch_signals(), pytest.raises(KeyboardInterrupt):
        follow(training, [signals, sends])
    assert training.checkpoints.read_latest().step == 2
