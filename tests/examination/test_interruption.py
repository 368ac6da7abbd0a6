"""A subject that raises what is no Exception does not end the examination in silence: a finding says so."""

import asyncio
import signal

import pytest
import torch
from torch import nn

import regard
from examination.subjects import Layer, hiding, later
from examination.whole_models import Still, causal


class OwnError(BaseException):
    """What somebody's program ends with."""


class Raising(Layer):
    """A right layer that raises an error where it has more than `tokens` tokens."""

    def __init__(self, error, tokens=0):
        super().__init__(hiding(later))
        self.error, self.tokens = error, tokens

    def forward(self, x):
        if x.shape[1] > self.tokens:
            raise self.error
        return super().forward(x)


ERRORS = [SystemExit(0), SystemExit("no\x1b[2J"), OwnError("ours"), GeneratorExit(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("tokens", [0, 6])
def test_what_is_no_exception_is_a_finding_beside_what_was_checked(error, tokens):
    layer = Raising(error, tokens).train()
    before = torch.get_rng_state()
    report = regard.examine(layer)
    assert not report
    assert [one.kind for one in report.findings] == ["raises"]
    assert f"it raised {type(error).__name__}" in report.findings[0].evidence
    assert " of test_interruption.py, while examining its " in report.findings[0].evidence
    assert bool(report.checked) == (tokens > 0)
    assert layer.training
    assert torch.equal(torch.get_rng_state(), before)
    assert "\x1b" not in f"{report}{report!r}"


def test_a_model_and_a_function_that_exit_are_findings_too():
    class Exiting(Still):
        def forward(self, ids):
            raise SystemExit(0)

    def function(q, k, v):
        raise SystemExit(0)

    for subject in (Exiting(causal), function):
        assert [one.kind for one in regard.examine(subject).findings] == ["raises"]


def test_an_interrupt_ends_the_examination():
    with pytest.raises(KeyboardInterrupt):
        regard.examine(Raising(KeyboardInterrupt()))


def test_what_a_signals_handler_raises_ends_the_program_as_it_should():
    class Signalled(nn.Module):
        def forward(self, x):
            signal.raise_signal(signal.SIGTERM)
            return x

    def handle(number, frame):
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        with pytest.raises(SystemExit):
            regard.examine(Signalled())
    finally:
        signal.signal(signal.SIGTERM, before)
