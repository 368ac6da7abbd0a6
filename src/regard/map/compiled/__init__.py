"""The passes of `fast.py` compiled by numba; only `fast.py` imports this package, and only if numba is installed."""
