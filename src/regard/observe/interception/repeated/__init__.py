"""Layers that repeat an earlier one, in this forward or in one before, where what was found there is read again."""
