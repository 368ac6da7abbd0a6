"""Check that the subject takes its own sample, and that its torch.compile version gives the same output."""

from collections.abc import Iterator, Sequence

import torch

from regard.examination import dependency
from regard.examination.case import Case
from regard.examination.evidence import get_sequence_rows
from regard.examination.report import Checked, Finding, Unknown

COMPILED = 1e3  # times rounding: a compiled module sums in another order


def report_refusal(errors: Sequence[str]) -> Finding:
    """Return the finding of a subject that raises for every input."""
    return Finding("raises", errors[0], "Fix what raises, or pass sample= as the subject is meant to be called.", 3.0, "raises")


def check_case(case: Case) -> Iterator[Finding | Checked | Unknown]:
    """Compare a compiled module with its original."""
    compiled = case.subject.compiled
    if compiled is None:
        return
    inputs = case.make_usual_inputs()
    expected = case.run_subject(*inputs).context
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
    change = max(float((get_sequence_rows(found, b) - get_sequence_rows(expected, b)).abs().max()) for b in range(len(found)))
    largest = float(expected.abs().max())
    if change <= COMPILED * dependency.estimate_rounding(case.subject.dtype) * largest:
        yield Checked("compiled and uncompiled outputs are equal", f"to within {change:.1g}; all other checks ran uncompiled")
    else:
        evidence = f"compiled, its output differs by {change:.2g}, with outputs up to {largest:.2g}"
        yield Finding(
            "wrong precision", evidence, "Compile it again (torch.compiler.reset()), or report it to torch.", cause="compiled"
        )
