"""Progress: what an examination has said so far, of which a report is made where it ends before it is done."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from regard.examination.report import Checked, Finding, Report, Unknown

Said = Finding | Checked | Unknown
Line = dict[str, Any]  # as json.dumps takes it
KINDS: dict[str, Callable[..., Said]] = {"finding": Finding, "checked": Checked, "unknown": Unknown}


class Progress:
    """The subject, what is expected of it, what is examined now and what has been said; each change is a line for `listen`.

    The lines, read in their order by another Progress, make it equal to this one.
    """

    def __init__(self, listen: Callable[[Line], object] | None = None) -> None:
        self.subject, self.expects, self.step = "", "", ""
        self.said: list[Said] = []
        self._listen = listen

    def begin(self, subject: str, expects: str) -> None:
        """State whose examination it is, and what is expected of it."""
        self.read({"subject": subject, "expects": expects})

    def examine_next(self, step: str) -> None:
        """State what is examined from now on."""
        self.read({"step": step})

    def add(self, said: Iterable[Said]) -> None:
        """Add what was said."""
        for one in said:
            self.read({type(one).__name__.lower(): asdict(one)})

    def read(self, line: Line) -> None:
        """Apply a line, and hand it on."""
        for name, value in line.items():
            if name in KINDS:
                self.said.append(KINDS[name](**value))
            elif name in ("subject", "expects", "step"):
                setattr(self, name, value)
        if self._listen is not None:
            self._listen(line)

    def unfinished(self, why: Finding) -> Report:
        """Return the report of what was said so far, the reason why there is no more first."""
        findings = tuple(one for one in self.said if isinstance(one, Finding))
        checked = tuple(one for one in self.said if isinstance(one, Checked))
        unknown = tuple(dict.fromkeys(one for one in self.said if isinstance(one, Unknown)))
        return Report(self.subject, self.expects, (why, *findings), checked, unknown)
