"""Find the formula that a subject computes: the variant of attention, right or wrong, that gives its outputs."""
