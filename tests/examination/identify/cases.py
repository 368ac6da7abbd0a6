"""A case of a subject, as examine makes it."""

import torch

from regard import Causal
from regard.examination.case import Case
from regard.examination.examine import get_stated_scale
from regard.examination.identify.match import identify_formula
from regard.examination.subject.adapters import iterate_adapters
from regard.examination.subject.inputs import find_working_inputs


def make_layer(make, *args, seed=0):
    """A seeded layer in evaluation mode."""
    torch.manual_seed(seed)
    return make(*args).eval()


def case_of(subject, expects=None, sample=None, scale=None, offset=0):
    expects = Causal() if expects is None else expects
    chosen, shapes = find_working_inputs(list(iterate_adapters(subject, expects, offset)), expects, sample, offset)
    return Case(chosen, expects, shapes, get_stated_scale(chosen, scale), offset, identify_formula)


def identify_subject(subject, *args, **options):
    return case_of(subject, *args, **options).match
