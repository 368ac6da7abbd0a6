"""The loops of `cpu.py` and `additive.py`, compiled by numba; only those two import them, and only if numba is installed."""
