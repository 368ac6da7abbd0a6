"""Attention in compiled code: an op beside each call."""
