"""Weights from other sources: files of arrays and checkpoints, with their tensors under regard's names."""
