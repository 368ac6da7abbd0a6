"""Readings of recorded attention calls: where queries, keys and values come from, their positions, and how weights are made."""
