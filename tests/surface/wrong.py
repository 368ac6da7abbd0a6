"""Arguments that are wrong, by the kind of parameter that they are handed to."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

HUGE = 10**30
Wrong = dict[str, Callable[[], Any]]  # what is wrong, and how it is made


def constant(**values: Any) -> Wrong:
    """Values that no call can change."""
    return {name.replace("_", " "): lambda value=value: value for name, value in values.items()}


def without(wrong: Wrong, *names: str) -> Wrong:
    """The same but for some, which a parameter takes."""
    assert set(names) <= set(wrong)
    return {name: make for name, make in wrong.items() if name not in names}


NONE = constant(none=None)
STRANGE = constant(
    a_string="1", an_object=object(), a_set={1}, bytes=b"1", a_lone_surrogate="\ud800", a_long_string="x" * 10**6
)
LISTS = constant(an_empty_list=[], a_list=[1, 2], a_list_of_strings=["a"], a_dict={"a": 1})
FRACTIONS = constant(a_fraction=1.5, a_fraction_below_1=0.5, not_a_number=math.nan, infinity=math.inf, complex=1j)
FAR = constant(huge=HUGE, negative_and_huge=-HUGE, beyond_floats=10**5000)
DTYPES: Wrong = {
    "an int tensor": lambda: torch.ones(1, 2, 5, 4, dtype=torch.int64),
    "a bool tensor": lambda: torch.ones(1, 2, 5, 4, dtype=torch.bool),
    "a complex tensor": lambda: torch.ones(1, 2, 5, 4, dtype=torch.complex64),
    "a float8 tensor": lambda: torch.ones(1, 2, 5, 4).to(torch.float8_e4m3fn),
    "a sparse tensor": lambda: torch.ones(1, 2, 5, 4).to_sparse(),
    "a quantised tensor": lambda: torch.quantize_per_tensor(torch.ones(1, 2, 5, 4), 0.1, 0, torch.quint8),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 5, 4)], layout=torch.jagged),
    "an array": lambda: np.ones((1, 2, 5, 4), np.float32),
    "uint8": lambda: torch.ones(1, 2, 5, 4, dtype=torch.uint8),
}
SHAPES: Wrong = {
    "a tensor without axes": lambda: torch.ones(()),
    "a vector": lambda: torch.ones(3),
    "six axes": lambda: torch.ones(1, 1, 1, 2, 5, 4),
    "another width": lambda: torch.ones(1, 2, 5, 7),
    "another batch": lambda: torch.ones(3, 2, 5, 4),
}
SCALARS = NONE | STRANGE | LISTS | DTYPES
TENSOR = NONE | STRANGE | LISTS | FRACTIONS | DTYPES | SHAPES
COUNT = SCALARS | FRACTIONS | constant(negative=-1, huge=HUGE, beyond_floats=10**5000)
NUMBER = SCALARS | constant(not_a_number=math.nan, complex=1j, beyond_floats=10**5000)
MASK = SCALARS | FRACTIONS | constant(a_class=int)
PLACE = NONE | STRANGE | FRACTIONS | FAR | constant(out_of_range=7, before_the_first=-8)
CHOICE = SCALARS | FRACTIONS | constant(a_number=3)
KIND = SCALARS | FRACTIONS | constant(a_number=3)
OBJECT = SCALARS | FRACTIONS | constant(a_number=3, a_class=int)
