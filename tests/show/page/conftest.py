"""A recording and a server of it with the sorter, both in float64, for the tests of a module."""

import pytest
import torch


@pytest.fixture(scope="module")
def recording():
    from show.page.server_client import record_sorter  # which needs what the browser's tests may be skipped for

    return record_sorter(keep="values")


@pytest.fixture(scope="module")
def client(recording):
    from show.page.server_client import make_sorter, open_client

    with open_client(recording, adapter=make_sorter(torch.float64)) as found:
        yield found


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Tell no one that loops are compiled, however long it takes here with an empty cache; see test_generation_loops."""
    try:
        from regard.show.page import generation_loops
    except ModuleNotFoundError:  # the page needs what is not installed, and its tests are skipped
        return
    monkeypatch.setattr(generation_loops, "PATIENCE_SECONDS", 600)
