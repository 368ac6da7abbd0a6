"""Recordings in files: a plain header and named tensors, with checks of everything that is read."""
