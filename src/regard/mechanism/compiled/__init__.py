"""The loops of `cpu.py` and `additive.py`, compiled by numba; nothing else imports them, and these only where it is there."""
