"""The number of examples that hypothesis draws, here and on an emulated processor."""

import os

EMULATED = "REGARD_TESTS_EMULATED" in os.environ  # set by processors.py, where the same tests run once more
FEWEST = 10


def limit_examples(most: int) -> int:
    """Return the number of examples of a test that draws `most` of them on this processor itself."""
    return min(most, max(FEWEST, most // 10)) if EMULATED else most
