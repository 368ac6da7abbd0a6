"""Products of two tensors that are followed: their axes, the formula of scores, and the traces of what becomes of them."""
