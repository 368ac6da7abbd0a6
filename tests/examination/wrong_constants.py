"""Wrong numbers in what is right otherwise: frequencies, slopes, factors on values."""

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
