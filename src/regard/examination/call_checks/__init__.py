"""Checks of recorded attention calls against the projections: scale, rows, heads, roles and positions."""
