"""Attention without a softmax: linear attention in any order and in chunks, decayed and activated scores."""
