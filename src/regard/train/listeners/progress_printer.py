"""Progress: a line of columns from time to time, as many as fit the width of the screen."""

import math
import shutil
import sys
import textwrap
import time
from typing import TextIO

from regard.terminal_escapes import escape_controls
from regard.train.training_state import Report, Training

INTERVAL_SECONDS, SHARE = 5.0, 0.02  # least time between two lines, and as a share of the run's; ignored for some
COLUMNS = {"step": 7, "loss": 7, "left": 7, "held out": 8, "tokens/s": 9, "of peak": 7}  # widths; the most important first
ORDER = ("step", "loss", "held out", "tokens/s", "of peak", "left")  # of the columns on the screen


class ProgressPrinter:
    """A listener that prints loss, tokens per second, share of the machine's peak, time left, samples and skipped batches.

    peak is in floating-point operations per second; 0 omits its column.
    """

    def __init__(self, peak: float = 0.0, out: TextIO | None = None) -> None:
        self.peak, self.out = peak, sys.stdout if out is None else out
        self._printed = -math.inf
        self._began = 0.0  # when the first step was reported: it takes longer than the others and is not counted
        self._steps = 0  # since the first step
        self._tokens = self._seconds = 0.0  # since the last line
        self._names: tuple[str, ...] = ()

    def __call__(self, training: Training, report: Report) -> None:
        if not training.is_first_process:
            return
        last = report.step == training.config.steps or bool(training.stopped)
        now = time.monotonic()
        self._began, self._steps = self._began or now, self._steps + bool(self._began)
        self._tokens, self._seconds = self._tokens + report.tokens, self._seconds + report.seconds
        patience = max(INTERVAL_SECONDS, SHARE * (now - self._began))
        if last or report.held_out_nats is not None or now - self._printed >= patience:
            self.print_row(training, report)
            self._printed, self._tokens, self._seconds = now, 0.0, 0.0
        if report.skipped:
            self.print_text(f"step {report.step}, batch {report.batch}, is skipped: {report.skipped}")
        if report.sample is not None:
            self.print_text(escape_controls(report.sample, "\n"))

    def print_row(self, training: Training, report: Report) -> None:
        """Print a line of columns, with a line of titles above the first one."""
        if not self._names:
            peak = bool(self.peak and training.task.flops)
            self._names = select_columns(shutil.get_terminal_size().columns, peak, training.held_out is not None)
            self.print_line("  ".join(name.rjust(COLUMNS[name]) for name in self._names))
        pace = self._tokens / max(self._seconds, 1e-9)
        steps = training.config.steps - report.step
        left = format_duration((time.monotonic() - self._began) / self._steps * steps) if self._steps else ""
        cells = {
            "step": f"{report.step:,}",
            "loss": f"{report.loss_nats:.4f}",
            "held out": "" if report.held_out_nats is None else f"{report.held_out_nats:.4f}",
            "tokens/s": f"{pace:,.0f}",
            "of peak": f"{pace * training.task.flops / self.peak:.0%}" if self.peak else "",
            "left": left,
        }
        self.print_line("  ".join(cells[name].rjust(COLUMNS[name]) for name in self._names))

    def print_text(self, text: str) -> None:
        """Print an indented text, wrapped between words to the width of the screen."""
        width = max(shutil.get_terminal_size().columns - 2, 8)
        for line in text.split("\n"):
            for part in textwrap.wrap(line, width, replace_whitespace=False, break_on_hyphens=False) or [""]:
                self.print_line(f"  {part}".rstrip())

    def print_line(self, line: str) -> None:
        """Write one line and flush it, so that readers of a pipe receive it at once."""
        print(line, file=self.out, flush=True)


def select_columns(width: int, peak: bool, held_out: bool) -> tuple[str, ...]:
    """Return the columns that fit the width of the screen, in their order."""
    known = [name for name in COLUMNS if (peak or name != "of peak") and (held_out or name != "held out")]
    while len(known) > 1 and sum(COLUMNS[name] + 2 for name in known) - 2 > width:
        known.pop()
    return tuple(name for name in ORDER if name in known)


def format_duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, hours and minutes, or days and hours."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour}h" if days else f"{hours}h {minute:02}m" if hours else f"{minutes}:{second:02}"
