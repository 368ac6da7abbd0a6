"""Recurrences over tokens that no map was read from, which a recording reports as missed."""
