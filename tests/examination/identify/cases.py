"""A case of a subject, as examine makes it."""

import torch

from regard import Causal
from regard.examination.case import Case
from regard.examination.examine import stated
from regard.examination.identify.match import identify
from regard.examination.inputs import fitted
from regard.examination.subjects import subjects


def made(make, *args, seed=0):
    """A seeded layer in evaluation mode."""
    torch.manual_seed(seed)
    return make(*args).eval()


def case_of(subject, expects=None, sample=None, scale=None, offset=0):
    expects = Causal() if expects is None else expects
    chosen, shapes = fitted(list(subjects(subject, expects, offset)), expects, sample, offset)
    return Case(chosen, expects, shapes, stated(chosen, scale), offset, identify)


def identified(subject, *args, **options):
    return case_of(subject, *args, **options).identified
