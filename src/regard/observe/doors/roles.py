"""What a torch function can be in attention that is written out by hand, told by its name, once for each function."""

import re
from enum import Enum, auto
from functools import cache
from typing import Any

ARITHMETIC = re.compile("^__[ri]?(add|sub|mul|div|truediv|floordiv|pow|matmul)__$")


class Role(Enum):
    """What a function does; of those without a role it is only asked what went in and what came out."""

    SOFTMAX = auto()
    LOG_SOFTMAX = auto()
    BENDS = auto()  # entry by entry, and not in a straight line: relu, exp, sigmoid
    POWER = auto()
    LOG = auto()
    PRODUCT = auto()  # multiplies and sums over an axis
    DISTANCE = auto()  # of each pair of two tensors
    TIMES = auto()  # multiplies entry by entry
    ADD = auto()
    SUM = auto()  # over an axis
    CONVOLVES = auto()


SOFTMAX = re.compile("softmax|softmin|sparsemax|entmax")
PRODUCT = re.compile(
    "^((.*_)?(matmul|mm|bmm|baddbmm|addbmm|addmm|mv|addmv|dot|vdot|vecdot|inner|tensordot|einsum|bilinear|multi_dot)|linear)$"
)
NAMES = {
    Role.BENDS: """relu relu6 rrelu leaky_relu prelu elu selu celu gelu silu mish sigmoid special_expit hardsigmoid hardswish
        hardtanh softplus softsign tanh exp exp2 special_exp2 expm1 special_expm1 square abs clamp clamp_min
        clip maximum fmax threshold heaviside""",
    Role.POWER: "pow float_power",
    Role.LOG: "log log2 log10 log1p",
    Role.DISTANCE: "cdist cosine_similarity pairwise_distance dist",
    Role.TIMES: "mul multiply addcmul div divide true_divide truediv",
    Role.ADD: "add sub subtract",
    Role.SUM: """sum nansum mean nanmean cumsum sum_to_size norm linalg_norm linalg_vector_norm index_add scatter_add
        index_reduce scatter_reduce segment_reduce""",
    Role.CONVOLVES: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
}
ROLES = {name: role for role, names in NAMES.items() for name in names.split()}
MULTIPLIES = {  # in whose presence a module may attend; those that layers use beside their weights are left out
    *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "vecdot", "inner"),
    *("tensordot", "einsum", "multi_dot", "cdist", "cosine_similarity", "pairwise_distance"),
}
NORMALISES = {
    *("softmax", "special_softmax", "_softmax", "log_softmax", "softmin", "gumbel_softmax", "exp", "exp_", "exp2"),
    *("_safe_softmax", "_masked_softmax"),
}


@cache
def infer_role(name: str) -> Role | None:
    """Return what a function of this name does; None where that is neither a step of attention nor asked for."""
    core = strip(name)
    if SOFTMAX.search(core):
        return Role.LOG_SOFTMAX if "log" in core else Role.SOFTMAX
    return Role.PRODUCT if PRODUCT.match(core) else ROLES.get(core)


def bends(role: Role | None, args: Any) -> bool:
    """Return whether a function makes weights of scores: it is no straight line, nor a root that a norm takes."""
    root = len(args) > 1 and isinstance(args[1], float | int) and args[1] < 1
    return role is Role.BENDS or (role is Role.POWER and not root)


def strip(name: str) -> str:
    """Return a function's name without what says that it is an operator, is private or works in place: iadd is add."""
    found = ARITHMETIC.match(name)
    return found[1] if found else name.strip("_")
