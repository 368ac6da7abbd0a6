"""Attention that a forward hands to a thread of its own is missed, and said so."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import Causal


def use_pool(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def use_thread(function, *args):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


class Worker(nn.Module):
    """A model whose attention runs in a thread that its forward starts."""

    def __init__(self, hand_over, attend):
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = lambda q: hand_over(attend, q)
        self.other = nn.Linear(4, 4)

    def forward(self, q):
        return self.inner(q) + self.other(q)


ATTENTION = {
    "scaled_dot_product_attention": lambda q: F.scaled_dot_product_attention(q, q, q),
    "attention": lambda q: regard.attention(q, q, q, Causal()),
}


@pytest.mark.parametrize("hand_over", [use_pool, use_thread])
@pytest.mark.parametrize("kernel", ATTENTION)
def test_attention_in_a_thread_that_a_forward_starts_is_missed(hand_over, kernel):
    model, q = Worker(hand_over, ATTENTION[kernel]), torch.randn(1, 2, 5, 4)
    plain = model(q)
    with pytest.warns(UserWarning, match="another thread than record"), regard.record(model) as recording:
        inside = model(q)
    assert torch.equal(plain, inside)
    assert not recording.calls
    assert kernel in {one.kernel for one in recording.missed}
    assert {(one.module, "another thread than record" in one.reason) for one in recording.missed} == {("inner", True)}


def test_other_work_in_such_a_thread_is_not_reported_and_attention_here_is_recorded():
    def attend_here_and_work_there(function, q):
        return use_thread(torch.exp, function(q))

    model, q = Worker(attend_here_and_work_there, ATTENTION["attention"]), torch.randn(1, 2, 5, 4)
    with regard.record(model) as recording:
        model(q)
    assert len(recording.calls) == 1
    assert not recording.missed


def test_a_thread_that_outlives_the_recording_reports_nothing_to_it():
    threads, go, q = [], threading.Event(), torch.randn(1, 2, 5, 4)

    def leave_behind(function, q):
        threads.append(threading.Thread(target=lambda: (go.wait(), function(q))))
        threads[0].start()
        return q

    model = Worker(leave_behind, ATTENTION["attention"])
    start = vars(threading.Thread)["start"]
    with regard.record(model) as recording:
        model(q)
    assert vars(threading.Thread)["start"] is start
    go.set()
    threads[0].join()
    assert not recording.missed
