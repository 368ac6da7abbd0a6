"""Collect the results of an examination as they are found, to report them if it ends early."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from regard.examination.report import Checked, Finding, Report, Unknown, prepend_results

Said = Finding | Checked | Unknown
Line = dict[str, Any]  # as json.dumps takes it
KINDS: dict[str, Callable[..., Said]] = {"finding": Finding, "checked": Checked, "unknown": Unknown}


class ExaminationProgress:
    """The subject, its expectation, the current step and the results so far; each change is passed to `listen` as a line.

    Another Progress that reads the lines in order becomes equal to this one.
    """

    def __init__(self, listen: Callable[[Line], object] | None = None) -> None:
        self.subject, self.expects, self.step = "", "", ""
        self.said: list[Said] = []
        self._listen = listen

    def begin(self, subject: str, expects: str) -> None:
        """Set the subject and its expectation."""
        self.apply_line({"subject": subject, "expects": expects})

    def begin_step(self, step: str) -> None:
        """Set the current step."""
        self.apply_line({"step": step})

    def add(self, results: Iterable[Said]) -> None:
        """Add results."""
        for one in results:
            self.apply_line({type(one).__name__.lower(): asdict(one)})

    def apply_line(self, line: Line) -> None:
        """Apply a line, and pass it to `listen`."""
        for name, value in line.items():
            if name in KINDS:
                self.said.append(KINDS[name](**value))
            elif name in ("subject", "expects", "step"):
                setattr(self, name, value)
        if self._listen is not None:
            self._listen(line)

    def make_partial_report(self, why: Finding) -> Report:
        """Return the report of the results so far, with `why` it ended early as the first finding."""
        return prepend_results(Report(self.subject, self.expects), [why, *dict.fromkeys(self.said)])
