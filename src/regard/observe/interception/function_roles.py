"""The roles that torch functions can have in handwritten attention, inferred from their names."""

import math
import re
from enum import Enum, auto
from functools import cache
from typing import Any

ARITHMETIC = re.compile("^__[ri]?(add|sub|mul|div|truediv|floordiv|pow|matmul)__$")


class Role(Enum):
    """What a function does in attention; a function without a role is followed by its inputs and outputs alone."""

    SOFTMAX = auto()
    LOG_SOFTMAX = auto()
    NONLINEAR = auto()  # nonlinear, entrywise: relu, exp, sigmoid
    POWER = auto()
    LOG = auto()
    PRODUCT = auto()  # a product that sums over an axis
    DISTANCE = auto()  # between each pair of rows of two tensors
    MULTIPLY = auto()  # an entrywise product
    ADD = auto()
    SUM = auto()  # over an axis
    CONVOLUTION = auto()
    ONE_HOT = auto()  # an index as a matrix of zeros and ones


SOFTMAX = re.compile("softmax|softmin|sparsemax|entmax")
PRODUCT = re.compile(
    "^((.*_)?(matmul|mm|bmm|baddbmm|addbmm|addmm|mv|addmv|dot|vdot|vecdot|inner|tensordot|einsum|bilinear|multi_dot)|linear)$"
)
NAMES = {
    Role.NONLINEAR: """relu relu6 rrelu leaky_relu prelu elu selu celu gelu silu mish sigmoid special_expit hardsigmoid
        hardswish hardtanh softplus softsign tanh exp exp2 special_exp2 expm1 special_expm1 erf special_erf square abs clamp
        clamp_min clip maximum fmax threshold heaviside""",
    Role.POWER: "pow float_power",
    Role.LOG: "log log2 log10 log1p",
    Role.DISTANCE: "cdist cosine_similarity pairwise_distance dist",
    Role.MULTIPLY: "mul multiply addcmul div divide true_divide truediv",
    Role.ADD: "add sub subtract",
    Role.SUM: """sum nansum mean nanmean cumsum sum_to_size norm linalg_norm linalg_vector_norm index_add scatter_add
        index_reduce scatter_reduce segment_reduce index_put""",
    Role.ONE_HOT: "one_hot",
    Role.CONVOLUTION: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
}
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
BOUNDS = {"clamp", "clamp_min", "clip"}
ROW_MAXIMA = {"amax", "max"}
EPSILON = 1e-3  # of a guard, at most
BASES = {"exp": math.e, "exp2": 2.0, "special_exp2": 2.0}  # of exponentials
POWERS = {"pow", "__rpow__"}  # which may raise a number to a tensor
MULTIPLIES = {  # a module that uses one may attend; names that layers also use without attention are left out
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "vecdot", "inner"),
    *("tensordot", "einsum", "multi_dot", "cdist", "cosine_similarity", "pairwise_distance"),
}
NORMALISES = {
    *("softmax", "special_softmax", "_softmax", "log_softmax", "softmin", "gumbel_softmax", "exp", "exp_", "exp2"),
    *("_safe_softmax", "_masked_softmax"),
}


@cache
def infer_role(name: str) -> Role | None:
    """Return the role of the function with this name; None if it has none. Cached per name."""
    core = strip_affixes(name)
    if SOFTMAX.search(core):
        return Role.LOG_SOFTMAX if "log" in core else Role.SOFTMAX
    return Role.PRODUCT if PRODUCT.match(core) else ROLES.get(core)


def is_nonlinear(role: Role | None, args: Any) -> bool:
    """Return whether a function can turn scores into weights: a nonlinear one.

    A power below 1 does not count: it is the root of a norm.
    """
    root = len(args) > 1 and isinstance(args[1], float | int) and args[1] < 1
    return role is Role.NONLINEAR or (role is Role.POWER and not root)


def name_exponential(name: str, args: Any) -> str:
    """Return the name of the exponential that a power of e or 2 is, one of BASES; nothing for another function."""
    base, exponent = args[::-1] if name == "__rpow__" else args
    is_number = isinstance(base, float | int) and not isinstance(exponent, float | int)
    return next((one for one, known in BASES.items() if is_number and base == known), "")


def guards_norm(name: str, args: Any, kwargs: Any, changes: tuple[str, ...]) -> bool:
    """Return whether a function of this name bounds what a norm changed, to guard a division or an angle: no activation.

    A lower bound of 0 or well above 0 is an activation, but not of the largest scores, which no softmax sees.
    """
    if has_number_bounds(name, args, kwargs) and changes[-2:-1] and changes[-2] in ROW_MAXIMA:  # the last is this function
        return True
    if strip_affixes(name) not in BOUNDS or not any("norm" in change for change in changes):
        return False
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    return low is None or (isinstance(low, float | int) and low != 0 and low <= EPSILON)


def has_number_bounds(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function of this name bounds its first argument by numbers, not by another tensor."""
    bounds = [*args[1:], *kwargs.values()]
    return strip_affixes(name) in BOUNDS and all(one is None or isinstance(one, float | int) for one in bounds)


@cache
def strip_affixes(name: str) -> str:
    """Return a function's name without operator, private and in-place affixes: `__iadd__` is `add`. Cached per name."""
    found = ARITHMETIC.match(name)
    return found[1] if found else name.strip("_")


@cache
def find_activation_name(class_name: str) -> str:
    """Return the name of the nonlinear function that a module of this class computes, if it is named alike; else nothing."""
    name = class_name.lower()
    return name if ROLES.get(name) is Role.NONLINEAR else ""
