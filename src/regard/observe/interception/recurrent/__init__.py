"""Interception of attention without a softmax: recurrences, state spaces and linear attention."""
