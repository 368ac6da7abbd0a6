"""Recurrences over tokens in loops, scans and convolutions, as implicit attention: S_i = a_i S_(i - 1) + k_i v_i."""
