"""Softmaxes in other forms: exponentials that are divided by their sums, before the product with the values or after it."""
