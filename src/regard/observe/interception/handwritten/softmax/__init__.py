"""Contexts of exponentials, which are divided by their sums after the product with the values."""
