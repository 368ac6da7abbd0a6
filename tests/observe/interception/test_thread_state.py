"""The state of a thread in each of its transitions: what it holds while they last, and that nothing remains of them."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import record
from regard.observe.interception.thread_state import OPEN_ENTRIES, STATE, InterceptionPause


class Attention(nn.Module):
    """Attention to its own input, which calls a function meanwhile."""

    def __init__(self, call=lambda: None):
        super().__init__()
        self.project, self.call = nn.Linear(6, 6), call

    def forward(self, x):
        self.call()
        y = self.project(x).unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y)


def describe_state():
    names = ("entries", "watchers", "frames", "inferred_masks", "skippable_modules", "parent_rows")
    flags = ("mode", "compiled_frame", "context", "is_cross", "is_in_skippable", "is_in_unwatched", "is_in_fast_path")
    state = vars(STATE)
    sizes = {name: len(state[name]) for name in names}
    return sizes | {name: state[name] for name in flags} | {"pause_depth": STATE.pause_depth, "keeps_mode": STATE.keeps_mode}


IDLE = describe_state()
X = torch.randn(2, 5, 6)


@pytest.fixture(autouse=True)
def returns_to_idle():
    assert describe_state() == IDLE
    yield
    assert describe_state() == IDLE
    assert OPEN_ENTRIES == []


def test_entering_adds_a_watcher_and_a_call_adds_a_frame():
    seen = []
    model = Attention(lambda: seen.append(([type(one.module) for one in STATE.frames], STATE.is_active)))
    with record(model) as recording:
        assert (len(STATE.entries), len(STATE.watchers), len(STATE.frames)) == (1, 1, 0)
        model(X)
        assert STATE.frames == []
    assert seen == [([Attention], True)]
    assert len(recording.calls) == 1


def test_nested_watchers_leave_in_any_order():
    model = Attention()
    first, second = record(model), record(model)
    outer, inner = first.__enter__(), second.__enter__()
    assert len(STATE.watchers) == 2
    model(X)
    first.__exit__(None, None, None)
    assert len(STATE.watchers) == 1
    model(X)
    second.__exit__(None, None, None)
    assert (len(outer.calls), len(inner.calls)) == (1, 2)


def test_an_exception_pops_the_frames_and_the_next_call_is_recorded():
    def fail():
        raise ValueError("theirs")

    model = nn.Sequential(nn.Identity(), Attention(fail))
    with record(model) as recording:
        with pytest.raises(ValueError, match="theirs"):
            model(X)
        assert STATE.frames == []
        model[1].call = lambda: None
        model(X)
    assert len(recording.calls) == 1


def test_an_exception_in_the_block_resets_everything():
    with pytest.raises(ValueError, match="theirs"), record(Attention()):
        raise ValueError("theirs")


def test_a_suspended_generator_watches_only_while_it_is_open():
    model = Attention()

    def watch():
        with record(model) as recording:
            yield recording
            yield recording

    generator = watch()
    recording = next(generator)
    assert len(STATE.entries) == 1
    model(X)
    generator.close()
    model(X)
    assert len(recording.calls) == 1


@pytest.mark.slow
def test_a_generator_that_another_thread_closes_resets_the_thread_that_entered():
    def watch():
        with record(Attention()):
            yield

    generator = watch()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    gc.collect()


def test_another_thread_has_a_state_of_its_own():
    found = []
    with record(Attention()):
        thread = threading.Thread(target=lambda: found.append(describe_state()))
        thread.start()
        thread.join()
    assert found == [IDLE]


def test_a_pause_ends_dispatch_and_counts_depth():
    model = Attention()
    with record(model) as recording:
        with InterceptionPause(), InterceptionPause():
            assert (STATE.pause_depth, STATE.is_active) == (2, False)
            model(X)
        assert (STATE.pause_depth, STATE.is_active) == (0, True)
        model(X)
    assert len(recording.calls) == 1


def test_nothing_is_dispatched_in_a_backward_pass():
    active = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            active.append(STATE.is_active)
            return grad

    model = nn.Sequential(Attention())
    with record(model) as recording:
        Probe.apply(model(X)).sum().backward()
    assert not any(active)
    assert len(recording.calls) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_nothing_is_dispatched_while_the_model_is_traced():
    active = []
    model = Attention(lambda: active.append(STATE.is_active))
    with pytest.warns(UserWarning, match="not recorded"), record(model) as recording:
        torch.jit.trace(model, X, check_trace=False)
    assert active == [False]
    assert recording.calls == []
    assert recording.missed
