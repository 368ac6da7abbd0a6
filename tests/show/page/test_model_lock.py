import threading

import pytest
import torch

from regard.show.page.model_lock import hold_model_lock


class GoneError(Exception):
    pass


def raise_gone():
    raise GoneError


def test_it_is_one_threads_at_a_time():
    lock = threading.Lock()
    with hold_model_lock(lock, lambda: None):
        assert lock.locked()
        with pytest.raises(GoneError), hold_model_lock(lock, raise_gone):
            pass
        assert lock.locked()
    assert not lock.locked()


def test_a_module_is_not_begun_when_nobody_waits():
    asked, lock, model = [], threading.Lock(), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.ReLU())

    def alive() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise GoneError

    with pytest.raises(GoneError), hold_model_lock(lock, alive):
        model(torch.zeros(1))
    assert len(asked) == 3
    assert not lock.locked()
    model(torch.zeros(1))
    assert len(asked) == 3


def test_modules_of_other_threads_are_not_asked():
    other = threading.Thread(target=lambda: torch.nn.ReLU()(torch.zeros(1)))
    with hold_model_lock(threading.Lock(), raise_gone):
        other.start()
        other.join(60)
