"""Probes: what the heads of a model do on inputs made for the purpose, random tokens that are repeated."""
