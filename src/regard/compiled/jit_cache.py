# mypy: ignore-errors
"""Compiled functions, cached on disk until a file of regard/compiled, or of the function's own folder, changes.

numba's own cache checks only the file that defines the function.
"""

import logging
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from uuid import uuid4

import numpy as np
from filelock import FileLock
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature

from regard.compiled.kernel_choice import can_use_tiles

UNREADABLE = AttributeError, ImportError, IndexError, EOFError, UnpicklingError  # what unpickling raises
SHARED_FOLDERS = Path(__file__).parent, Path(__file__).parents[1] / "matmul"  # whose functions others inline
PATIENCE_SECONDS = 120.0  # for another process that compiles the same function; after it both do
LOGGER = logging.getLogger("regard.compiled")
VALUES = (bool, int, float, str, type(None), type, np.generic, np.dtype)  # types whose repr is the same in every process


class UniqueCacheFile(IndexDataCacheFile):
    """numba's cache files of a function, with unique names: processes that compile at once would pick the same number.

    What cannot be read counts as missing: a version of regard from before or after this one may have stored a class that this
    one does not have, and a full disk half of a file.
    """

    def load(self, key):
        """Return what is stored for a key; None if there is nothing that can be read."""
        try:
            return super().load(key)
        except UNREADABLE:
            return None

    def _load_index(self):
        try:
            return super()._load_index()
        except UNREADABLE:
            return {}

    def _data_name(self, number):
        return super()._data_name(uuid4().int)


class LoopCache(FunctionCache):
    """numba's cache with keys of our own: numba's hash of a closure differs between processes.

    Of processes that need the same function at once one compiles it, and the others wait and read it: a lock is held from a
    load that found nothing until the save, or until compiling fails. It ends with its process.
    """

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = UniqueCacheFile(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())
        self._lock = None  # while this process compiles the function

    def _index_key(self, sig, codegen):
        return (
            sig,
            codegen.magic_tuple(),
            can_use_tiles(),  # which Linux may allow one process and refuse another
            *map(checksum_folder, SHARED_FOLDERS),
            *make_function_key(self._py_func),
        )

    def load_overload(self, sig, target_context):
        """Return the compiled function of a signature; if there is none, log that it has to be compiled and return None."""
        found = super().load_overload(sig, target_context)
        if found is None:
            LOGGER.info("compiling loops for this processor, once: this takes a few seconds")
            self.acquire_lock()
            found = super().load_overload(sig, target_context)
            if found is not None:
                self.release_lock()
        return found

    def save_overload(self, sig, data):
        """Save a compiled function; on a full disk it stays in memory only."""
        try:
            with suppress(OSError):
                super().save_overload(sig, data)
        finally:
            self.release_lock()

    def acquire_lock(self):
        """Wait until no other process compiles the function, if its file system has locks; no longer than patience lasts."""
        path = Path(self._cache_path) / f"{self._impl.filename_base}.lock"
        with suppress(OSError, NotImplementedError, RuntimeError):  # the last one in a child forked while its parent compiled
            lock = FileLock(path, PATIENCE_SECONDS, thread_local=False, is_singleton=True)  # of all closures of this name
            lock.acquire()
            self._lock = lock

    def release_lock(self):
        """Let other processes compile the function."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class MemoryOnlyCache(NullCache):
    """No cache, for machines where no folder can be written: each process compiles again."""

    def load_overload(self, sig, target_context):
        """Log that a function has to be compiled."""
        LOGGER.info(
            "compiling loops for this processor, in each process: set NUMBA_CACHE_DIR to a writable folder to do it once"
        )


class LazyCallback(CFunc):
    """A C callback that is compiled, or read from the cache, when its address is first needed."""

    @property
    def address(self):
        """The address of the callback."""
        if self._wrapper_address is None:
            self.compile()
        return self._wrapper_address

    def compile(self):
        """Compile the callback, once even if several threads call this at the same time."""
        with global_compiler_lock:
            if self._wrapper_address is None:
                super().compile()


def attach_cache(compiled, function):
    """Let a dispatcher or callback use the cache of its function on disk, or none if no folder can be written."""
    try:
        compiled._cache = cache_on_disk = LoopCache(function)
    except RuntimeError:  # raised by numba if it finds no such folder
        compiled._cache = MemoryOnlyCache()
        return
    compile_uncached = compiled._compiler.compile

    def compile_or_release(args, return_type):
        try:
            return compile_uncached(args, return_type)
        except BaseException:  # an error in the function, or Ctrl-C: nothing will be saved
            cache_on_disk.release_lock()
            raise

    compiled._compiler.compile = compile_or_release


def make_function_key(function):
    """Return a function's key, equal in every process: its name, its folder's contents, and what it closes over."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    folder = Path(function.__code__.co_filename).parent
    return (
        function.__module__,
        function.__qualname__,
        checksum_folder(folder),
        *(make_value_key(function, one) for one in cells),
    )


def make_value_key(function, value):
    """Return the key of one closure value; raise TypeError if its repr may differ between processes."""
    if isinstance(value, Dispatcher):
        return make_function_key(value.py_func)
    if isinstance(value, VALUES):
        return repr(value)
    raise TypeError(
        f"{function.__qualname__} closes over {type(value).__name__}, for which no cache key can be made: it would be "
        "compiled again in every process. Pass it as an argument, or make it a global of the module."
    )


@cache
def checksum_folder(folder):
    """Return a number that changes with any file of a folder."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))


def njit_with_cache(signature=None):
    """Return njit, without the GIL, for functions that inline others; for one signature, or for each on first use."""

    def compile_function(function):
        dispatcher = njit(nogil=True)(function)
        attach_cache(dispatcher, function)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return compile_function


def callback_with_cache(arguments):
    """Return a decorator that compiles a callback for torch's threads: a function of the address of such `Arguments`."""

    def wrap_function(function):
        work = LazyCallback(function, normalize_signature(types.void(types.voidptr)), locals={}, options={})
        attach_cache(work, function)
        work.arguments = arguments
        return work

    return wrap_function
