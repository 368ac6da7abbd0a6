"""On PYTHONPATH, makes Python and the processes that it starts behave as if numba were not installed."""

import sys

sys.modules["numba"] = None
