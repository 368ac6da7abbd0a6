"""Runs: which calls belong to one forward or generation, in which layer and at which positions, and their words."""
