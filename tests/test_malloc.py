import subprocess
import sys

import pytest

from regard.malloc import find_glibc

HELD = """
from pathlib import Path
from regard import malloc
import ctypes

def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

def taken_and_freed():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    here = libc.malloc(200 * 2**20)
    ctypes.memset(here, 1, 200 * 2**20)
    libc.free(here)

before = megabytes()
malloc.keep_freed_memory()
taken_and_freed()
kept = megabytes() - before
malloc.restore_malloc_defaults()
print(kept > 190, megabytes() - before < 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_glibc() is None, reason="the C library is not glibc")
def test_what_is_freed_is_kept_until_it_is_as_usual_again():
    found = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]
