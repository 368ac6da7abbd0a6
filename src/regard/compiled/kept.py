# mypy: ignore-errors
"""Compiled functions, kept on disk until a file that they are made of changes: numba alone looks at the one they stand in."""

import zlib
from functools import cache
from pathlib import Path
from uuid import uuid4

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature


class Entries(IndexDataCacheFile):
    """Numba's files of a function, no two of one name: processes that compile at once would each take the next number."""

    def _data_name(self, number):
        return super()._data_name(uuid4().int)


class Cache(FunctionCache):
    """Numba's cache, its entries marked by what all the files of this folder and of the function's hold."""

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = Entries(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def _index_key(self, *args):
        own = Path(self._py_func.__code__.co_filename).parent
        return (*super()._index_key(*args), stamp(Path(__file__).parent), stamp(own))


@cache
def stamp(folder):
    """A number that changes with any file of a folder."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))


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


def callback(signature):
    """cfunc: a function with an address, which torch's threads can be given."""

    def compiled(function):
        work = CFunc(function, normalize_signature(signature), locals={}, options={})
        work._cache = Cache(function)
        work.compile()
        return work

    return compiled
