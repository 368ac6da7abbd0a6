"""Wrong numbers in what is right otherwise: frequencies, slopes, factors on values."""

import math

import torch

from examination.wrong_calls import C, D, Rotary


class RotaryOfOneFrequency(Rotary):
    """The exponents are divided as integers, so that all are 0."""

    def __init__(self):
        super().__init__()
        self.inv_freq = 1 / 100 ** (torch.arange(0, D, 2) // C)


class RotaryRising(Rotary):
    """The minus before the exponents is missing."""

    def __init__(self):
        super().__init__()
        self.inv_freq = 100 ** (torch.arange(0, D, 2) / D)


class ValuesScaled(Rotary):
    """The scale is on the values, too."""

    def attend(self, q, k, v):
        return super().attend(q, k, v / math.sqrt(D))


class ContextTimesWidth(Rotary):
    """The context is divided by the scale."""

    def attend(self, q, k, v):
        return super().attend(q, k, v) * math.sqrt(D)
