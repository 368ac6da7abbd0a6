"""The passes of `fast.py`, compiled by numba; nothing else imports it, and this only where it is installed."""
