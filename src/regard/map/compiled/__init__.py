"""The loops of `compiled_passes.py` and `pair_products.py`, compiled by numba. Only these two import this package."""
