# mypy: ignore-errors
"""Compiled functions, kept on disk until a file that they are made of changes: numba alone looks at the one they stand in."""

import zlib
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache

FILES = ("registers.py", "vectors.py", "blocks.py", "walks.py")
STAMP = zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in FILES))


class Cache(FunctionCache):
    """Numba's cache, its entries marked by what all the files hold."""

    def _index_key(self, *args):
        return (*super()._index_key(*args), STAMP)


def kept(signature=None):
    """njit, without Python's lock, of a function that others are inlined in; of one signature, or of each that is met."""

    def compiled(function):
        dispatcher = njit(nogil=True)(function)
        dispatcher._cache = Cache(function)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return compiled
