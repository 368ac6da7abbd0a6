"""Check that the subject takes its own sample, and that its torch.compile version gives the same output."""

from collections.abc import Iterator, Sequence

import torch

from regard.examination import reach
from regard.examination.case import Case
from regard.examination.evidence import rows
from regard.examination.report import Checked, Finding, Unknown

COMPILED = 1e3  # times rounding: a compiled module sums in another order


def refused(errors: Sequence[str]) -> Finding:
    """Return the finding of a subject that raises for every input."""
    return Finding("raises", errors[0], "Fix what raises, or pass sample= as the subject is meant to be called.", 3.0, "raises")


def look(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Compare a compiled module with its original."""
    compiled = case.subject.compiled
    if compiled is None:
        return
    inputs = case.usual()
    expected = case.ask(*inputs).context
    try:
        with torch.no_grad():
            found = compiled(*inputs).context
    except Exception as error:  # of the compiler, or of the layer
        yield Finding(
            "raises",
            f"compiled, it raises {type(error).__name__}: {error}",
            "Run it uncompiled, or fix what the compiler refuses.",
            cause="raises",
        )
        return
    change = max(float((rows(case, found, b) - rows(case, expected, b)).abs().max()) for b in range(len(found)))
    largest = float(expected.abs().max())
    if change <= COMPILED * reach.rounding(case.subject.dtype) * largest:
        yield Checked("compiled, it gives what it gives uncompiled", f"to {change:.1g}; all else is of the uncompiled one")
    else:
        told = f"compiled, its output differs by {change:.2g}, of numbers up to {largest:.2g}"
        yield Finding(
            "wrong precision", told, "Compile it again (torch.compiler.reset()), or report it to torch.", cause="compiled"
        )
