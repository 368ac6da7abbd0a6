"""Settings of the tests of maps."""

from unittest import mock

import pytest

from regard.map import small_maps


@pytest.fixture(autouse=True, scope="module")
def limit_batches():
    """Up to 16 queries and keys all matrices go through one pass, and above one at a time, as elsewhere above 256."""
    with mock.patch.object(small_maps, "LONGEST", 16):
        yield
