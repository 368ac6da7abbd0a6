"""Seeing: in the terminal, and as figures."""
