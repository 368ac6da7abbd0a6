"""Run `regard examine`.

Exit code 1 if something was found, or if the subject ended the examination early; 3 if nothing was found, but the verdict
requires something that could not be examined.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.cli.arguments.examine import WARNING
from regard.errors import ConfigError, DataError

PROCESS = "import os, sys; sys.path[:] = sys.argv[1].split(os.pathsep); from regard.cli.examine_process import main; main()"
DUMP_SECONDS = 5.0  # for a process to write its traceback, before it is ended


def run(options: argparse.Namespace) -> int:
    """Examine in a separate process, and print. Return 0 if all is right, 1 if something was found, 3 if neither is known."""
    if (options.target is None) == (options.model is None):
        raise ConfigError("pass FILE.py:NAME, or --model and a folder, one of the two.")
    if options.json and options.format != "text":
        raise ConfigError(f"--json and --format {options.format} are two formats of one report: leave out one of them.")
    if sys.stderr.isatty():
        print(f"regard examine: {WARNING}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="regard-examine-") as folder:
        lines, dump = Path(folder) / "lines", Path(folder) / "dump"
        lines.touch()
        dump.touch()
        status = run_process(options, lines, dump)
        entries = list(read_lines(lines))
        last: dict[str, Any] = entries[-1] if entries else {"failed": True}
        if "error" in last:
            raise ConfigError(last["error"])
        if "failed" in last:  # a bug in regard, whose traceback the process printed
            return 1
        if "text" not in last:
            last = explain_early_end(options, status, entries, dump.read_text(encoding="utf-8", errors="replace"))
    print_ignoring_broken_pipe(last["text"])
    code: int = last["code"]
    return code


def run_process(options: argparse.Namespace, lines: Path, dump: Path) -> int | None:
    """Run the process that examines; return its exit status, None if it was ended at the time limit."""
    given = {name: value for name, value in vars(options).items() if name != "command"}
    warnings = [f"-W{one}" for one in sys.warnoptions]
    arguments = [os.pathsep.join(sys.path), str(lines), str(dump), json.dumps(given)]
    command = [sys.executable, "-P", *warnings, "-c", PROCESS, *arguments]
    with (
        exit_on_sigterm(),
        subprocess.Popen(command, stdout=2 if options.json or options.format == "sarif" else None) as process,
    ):
        try:
            while not lines.stat().st_size and process.poll() is None:
                time.sleep(0.02)  # while PyTorch is imported
            return process.wait(options.time_limit)
        except subprocess.TimeoutExpired:
            dump_traceback(process, dump)
            return None
        finally:
            process.kill()


def dump_traceback(process: "subprocess.Popen[bytes]", dump: Path) -> None:
    """Make a process write its traceback; it does so even during a call into C."""
    if not hasattr(signal, "SIGUSR1"):  # Windows
        return
    process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + DUMP_SECONDS
    while b"<module>" not in dump.read_bytes() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within the context, so that the process is ended with the command."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what the process wrote; a line that is incomplete because the process ended is dropped."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def explain_early_end(
    options: argparse.Namespace, status: int | None, entries: list[dict[str, Any]], dump: str
) -> dict[str, Any]:
    """Return text and exit code for a process that ended early; raise DataError if it had not loaded its subject."""
    from regard.cli.examine_process import render_report
    from regard.examination import interruption
    from regard.examination.progress import ExaminationProgress

    progress = ExaminationProgress()
    for line in entries:
        progress.apply_line(line)
    if status is None:
        why = interruption.report_timeout(options.time_limit, progress.step, interruption.locate_in_dump(dump))
    else:
        why = interruption.report_process_end(status, progress.step)
    if not progress.subject:
        raise DataError(f"{options.target or options.model} could not be loaded: {why.evidence}.")
    return {"text": render_report(progress.make_partial_report(why), options), "code": 1}


def print_ignoring_broken_pipe(text: str) -> None:
    """Print a text, and continue if the reader, e.g. `head`, has read enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
