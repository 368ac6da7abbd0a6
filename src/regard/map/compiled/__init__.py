"""The passes of `numba_passes.py`, compiled by numba. Only that module imports this package, if numba is installed."""
