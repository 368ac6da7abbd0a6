"""Attention in compiled code: an op beside each call, or a second run of the graph."""
