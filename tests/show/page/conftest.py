"""A recording and a server of it with the sorter, both in float64, for the tests of a module."""

import pytest
import torch


@pytest.fixture(scope="module")
def recording():
    from show.page.asking import recorded  # which needs what the browser's tests may be skipped for

    return recorded(keep="values")


@pytest.fixture(scope="module")
def client(recording):
    from show.page.asking import asking, sorter

    with asking(recording, adapter=sorter(torch.float64)) as found:
        yield found
