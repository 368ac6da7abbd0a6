"""Wrappers of functions that compute attention: torch's kernels, flex_attention, the registry of transformers, and others."""
