"""Searches back through the operations that made a tensor: its layer, its tokens, its rows and its factors."""
