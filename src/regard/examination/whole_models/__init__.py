"""Examination of whole models: the recorded calls of each layer, which token moves which output, and decoding with a cache."""
