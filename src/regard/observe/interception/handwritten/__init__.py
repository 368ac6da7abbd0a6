"""Detection of attention that a model computes by hand, and the call behind it."""
