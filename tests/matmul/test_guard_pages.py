"""Compiled products read and write nothing outside their buffers."""

import subprocess
import sys
from pathlib import Path

import pytest

from skips import NEEDS_LOOPS

PROGRAM = Path(__file__).with_name("guard_pages.py")


@pytest.mark.slow
@pytest.mark.emulated
@NEEDS_LOOPS
def test_products_whose_buffers_touch_unreadable_memory_end_and_are_the_same():
    """In a process of its own, which reading it would end."""
    ran = subprocess.run([sys.executable, "-W", "error", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout.splitlines()[-1:]}, status {ran.returncode}: {ran.stderr[-2000:]}"
