"""Scores of heads by the detectors, and the kinds that follow from them."""
