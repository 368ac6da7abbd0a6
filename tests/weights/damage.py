"""Damage for the tests: what it does to the bytes of a file, and a limit on what reading it may take."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import RegardError, WeightsError

SECONDS, GIBIBYTES = 60, 2
EXTREMES = (b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", (2**62).to_bytes(8, "little"), b"9" * 8, b"-1")


def damage(data: st.DataObject, content: bytes, head: int = 2000) -> tuple[str, bytes]:
    """What is done, and the content after it: cut, one bit turned, or bytes written over others, put in or taken out."""
    kind = data.draw(st.sampled_from(["cut", "flip", "write", "insert", "remove"]))
    front, back = st.integers(0, min(head, len(content)) - 1), st.integers(max(0, len(content) - head), len(content) - 1)
    at = data.draw(st.one_of(st.integers(0, len(content) - 1), front, back))
    if kind == "cut":
        return kind, content[:at]
    if kind == "flip":
        return kind, content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
    piece = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(EXTREMES)))
    end = at if kind == "insert" else at + len(piece)
    return kind, content[:at] + (b"" if kind == "remove" else piece) + content[end:]


@contextlib.contextmanager
def limit_resources() -> Iterator[None]:
    """Fails a test that computes for a minute, and refuses it more than two gibibytes beside what the process has."""
    resource, former = pytest.importorskip("resource", reason="needs limits on memory, which Windows has none of"), None
    status = Path("/proc/self/statm")
    if status.exists():
        former = resource.getrlimit(resource.RLIMIT_AS)
        size = int(status.read_text().split()[0]) * resource.getpagesize() + (GIBIBYTES << 30)
        resource.setrlimit(resource.RLIMIT_AS, (size, former[1]))
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processors' time, so that a busy machine makes no difference
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        if former is not None:
            resource.setrlimit(resource.RLIMIT_AS, former)


def attempt(read: Callable[[], Any], refusal: type[RegardError] = WeightsError) -> Any:
    """What is read within the limits, or None where it is refused in at most 500 characters."""
    message = ""
    try:
        with limit_resources():
            return read()
    except refusal as error:
        message = str(error)
    assert 0 < len(message) <= 500
    return None


def stop(*_: object) -> None:
    pytest.fail(f"a damaged file was still read after {SECONDS} seconds of computation")


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> int:
    """How many numbers differ in one bit or more; the tensors must be the same ones."""
    assert found.keys() == expected.keys()
    count = 0
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        unequal = found[name].contiguous().view(torch.uint8) != tensor.contiguous().view(torch.uint8)
        count += int(unequal.view(-1, tensor.element_size()).any(-1).sum())
    return count
