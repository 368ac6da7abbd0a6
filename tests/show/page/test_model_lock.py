import math
import threading
from collections.abc import Iterator

import pytest
import torch

from regard.show.page.model_lock import PriorityLock, hold_model_lock
from show.page.server_client import wait_until


class GoneError(Exception):
    pass


def raise_gone():
    raise GoneError


def test_it_is_one_threads_at_a_time():
    lock = PriorityLock()
    with hold_model_lock(lock, lambda: None):
        with pytest.raises(GoneError), hold_model_lock(lock, raise_gone):
            pass
        assert lock.is_held
    assert not lock.is_held


def test_it_is_free_between_two_items_and_goes_to_the_highest_priority_first():
    lock, done, waiting = PriorityLock(), [], []

    def compute(name: str, count: int = 2) -> Iterator[str]:
        for n in range(count):
            done.append(f"{name}{n}")
            if not waiting:
                waiting.extend(threading.Thread(target=run, args=one) for one in (("old", 0), ("new", 2), ("other", math.inf)))
                for one in waiting:
                    one.start()
                wait_until(lambda: len(lock._priorities) == 3)
            yield name

    def run(name: str, priority: float) -> None:
        for _ in lock.iterate(compute(name), lambda: None, priority):
            pass

    run("first", 1)
    for one in waiting:
        one.join(60)
    assert done == ["first0", "other0", "other1", "new0", "new1", "first1", "old0", "old1"]


def test_a_module_is_not_begun_when_nobody_waits():
    asked, lock, model = [], PriorityLock(), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU())

    def alive() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise GoneError

    with pytest.raises(GoneError), hold_model_lock(lock, alive):
        model(torch.zeros(1))
    assert len(asked) == 3
    assert not lock.is_held
    model(torch.zeros(1))
    assert len(asked) == 3


def test_modules_of_other_threads_are_not_asked():
    other = threading.Thread(target=lambda: torch.nn.ReLU()(torch.zeros(1)))
    with hold_model_lock(PriorityLock(), raise_gone):
        other.start()
        other.join(60)
