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
