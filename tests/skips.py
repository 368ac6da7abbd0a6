"""What some tests need and a machine may lack, each as one mark."""

import pytest

from regard.compiled import kernel_choice, threads

NEEDS_LOOPS = pytest.mark.skipif(
    not threads.can_run_loops(), reason="numba is not installed, or torch has no OpenMP of GNU's kind"
)
NEEDS_BFLOAT16 = pytest.mark.skipif(
    not kernel_choice.is_bfloat16_product_faster(64), reason="this processor has no products of bfloat16"
)
