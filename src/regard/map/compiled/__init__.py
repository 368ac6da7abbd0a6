"""The passes of `compiled_passes.py`, compiled by numba. Only that module imports this package, if numba is installed."""
