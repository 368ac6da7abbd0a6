"""Each family of transformers that attends is measured, or has a reason of its own."""

import pytest
from benchmarks.coverage import run


@pytest.mark.slow
def test_each_family_that_attends_is_measured_or_has_a_reason():
    rows = run({}).rows
    assert [row[0] for row in rows if "not looked at" in str(row[-1])] == []
    assert sum(row[2] for row in rows) >= 531
