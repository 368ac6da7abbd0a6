"""A corpus for the small runs of a file."""

import pytest

from train import small_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus")
    small_runs.corpus(path)
    return path
