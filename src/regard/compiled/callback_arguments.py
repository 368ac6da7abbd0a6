"""The arguments of a compiled function that runs on torch's threads: a structure that Python fills and the function reads."""

import ctypes


class Arguments(ctypes.Structure):
    """Base of such structures. A field that is not set is 0; a name that is no field raises AttributeError."""

    __slots__ = ()


def integer_fields(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Return fields of these names: sizes, strides, and addresses of arrays, 0 for none."""
    return [(name, ctypes.c_int64) for name in names.split()]
