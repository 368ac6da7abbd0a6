"""Check a kernel (q, k, v) -> context, and what it returns beside it, against the formula in float64."""
