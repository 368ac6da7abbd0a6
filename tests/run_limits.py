"""The limits of a run of the tests: examples that hypothesis draws, and minutes after which cases are left out."""

import os

EMULATED = "REGARD_TESTS_EMULATED" in os.environ  # set by processors.py, where the same tests run once more
MINUTES = float(os.environ.get("REGARD_TESTS_MINUTES", "inf"))  # set by make
FEWEST = 10


def limit_examples(most: int) -> int:
    """Return the number of examples of a test that draws `most` of them on this processor itself."""
    return min(most, max(FEWEST, most // 10)) if EMULATED else most
