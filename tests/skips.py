"""What some tests need and a machine may lack, each as one mark."""

import pytest

from regard.compiled import threads

NEEDS_LOOPS = pytest.mark.skipif(
    not threads.can_run_loops(), reason="numba is not installed, or torch has no OpenMP of GNU's kind"
)
