"""Attention as pure functions on tensors, from scores to fused kernels."""

from regard.mechanism import heads, positions, scores, softmax
from regard.mechanism.fused import attention, choose
from regard.mechanism.masks import EVERYTHING, Causal, Documents, Everything, Given, Mask, Padding, Prefix, Window
from regard.mechanism.steps import Steps, attend

__all__ = [
    "EVERYTHING",
    "Causal",
    "Documents",
    "Everything",
    "Given",
    "Mask",
    "Padding",
    "Prefix",
    "Steps",
    "Window",
    "attend",
    "attention",
    "choose",
    "heads",
    "positions",
    "scores",
    "softmax",
]
