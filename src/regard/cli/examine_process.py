"""The process in which `regard examine` runs the subject: its results are written line by line, for the command to print.

The subject may end this process, by sys.exit, os._exit or a crash, or never return: the command reads the lines written so far.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from regard.atomic_write import write_atomically
from regard.cli import walk_custom
from regard.cli.examine_formats import render_annotations, render_sarif
from regard.cli.examine_subject import find_object, make_subject
from regard.cli.progress_bar import show_bar
from regard.errors import ConfigError, DataError, RegardError
from regard.examination import interruption
from regard.examination.baseline import apply_allowances, format_baseline, list_allowances, read_baseline
from regard.examination.examine import examine_step_by_step, examine_within_limit
from regard.examination.progress import ExaminationProgress, Line
from regard.examination.report import WIDTH, Report
from regard.examination.time_limit import UNLIMITED
from regard.examination.whole_models import whole_model
from regard.mechanism import Mask
from regard.show.report_html import render_document

INCONCLUSIVE = 3  # the exit code
SEED = 123  # of random weights and of a sample


def main() -> None:
    """Run an examination; sys.argv has Python's path, the file for lines, the file for tracebacks, and the options."""
    _, _, lines, dump, given = sys.argv
    sys.argv = ["regard"]  # visible to the examined file
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise Ctrl-C is ignored, e.g. in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout, sys.stderr = open_ignoring_broken_pipe(1), open_ignoring_broken_pipe(2)
    with open(lines, "a", encoding="utf-8") as stream, open(dump, "w", encoding="utf-8") as frames:
        if hasattr(faulthandler, "register"):  # POSIX
            faulthandler.register(signal.SIGUSR1, frames)
        write_result(argparse.Namespace(**json.loads(given)), stream)


def write_result(options: argparse.Namespace, stream: TextIO) -> None:
    """Examine the target, and write each step as a line: the last has the text to print and the exit code, or the error."""

    def write_line(line: Line) -> None:
        stream.write(json.dumps(line) + "\n")
        stream.flush()

    try:
        allowed = [] if options.baseline is None else read_baseline(Path(options.baseline))
        report, subject = examine_target(options, ExaminationProgress(write_line))
        report = replace(apply_allowances(report, allowed), strict=options.strict)
        if options.write_baseline is not None:
            write_text(Path(options.write_baseline), format_baseline([*allowed, *list_allowances(report)]), "--write-baseline")
        code = 0 if report.ok else INCONCLUSIVE if report.is_inconclusive else 1
        write_line({"text": render_report(report, options, subject), "code": code})
    except RegardError as error:
        write_line({"error": str(error)})
    except Exception:  # a bug in regard
        write_line({"failed": True})
        traceback.print_exc()


def examine_target(options: argparse.Namespace, progress: ExaminationProgress) -> tuple[Report, object]:
    """Return the report on the target of the options, and the target."""
    expects, sample = parse_expects(options.expects), draw_sample(options.sample)
    torch.manual_seed(SEED)
    progress.begin_step("code")  # while the subject is loaded
    subject = load_subject(options)
    with show_progress(subject, sample):
        try:
            report = examine_within_limit(
                lambda **how: examine_step_by_step(
                    subject, expects=expects, sample=sample, scale=options.scale, offset=options.offset, **how
                ),
                UNLIMITED,
                progress,
            )
        except KeyboardInterrupt as error:  # raised by the subject: Ctrl-C ends this process at once
            report = progress.make_partial_report(interruption.report_exception(error, progress.step))
    return report, subject


def load_subject(options: argparse.Namespace) -> Any:
    """Return what to examine: the model in a folder, or the object that the target names."""
    if options.model is None:
        return make_subject(options.target, find_object(options.target), options.args)
    from regard.cli.model_loading import BASE_MODEL, CAUSAL_LM, load_model  # of transformers, which takes seconds to import

    adapter: Any = load_model(options.model, CAUSAL_LM if options.expects == "causal" else BASE_MODEL)
    return adapter.model


def render_report(report: Report, options: argparse.Namespace, subject: object = None) -> str:
    """Return a report as text, JSON, SARIF or annotations; write its page if one is requested."""
    if options.page is not None:
        write_text(Path(options.page), render_document(report), "--page")
    if options.format == "sarif":
        return render_sarif(report, subject)
    if options.format == "github":
        return f"{render_annotations(report, subject)}\n{report}".lstrip()
    if options.json:
        return json.dumps(report.json(), allow_nan=False)
    return report.format_table(min(shutil.get_terminal_size().columns, WIDTH))


def open_ignoring_broken_pipe(handle: int) -> TextIO:
    """Open standard output or error as a stream that ignores a broken pipe."""
    return io.TextIOWrapper(
        io.BufferedWriter(BrokenPipeIgnoringFile(handle, "w", closefd=False)), errors="backslashreplace", line_buffering=True
    )


class BrokenPipeIgnoringFile(io.FileIO):
    """A file that ignores a broken pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file that an option names; raise DataError if it cannot be written."""
    try:
        with write_atomically(path) as (partial,):
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{option} {path}: {error.strerror or error}.") from None


def parse_expects(text: str) -> Mask:
    """Parse the mask rule of --expects."""
    try:
        return walk_custom.parse_mask(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--mask", "--expects")) from None


def draw_sample(shape: str | None) -> Tensor | tuple[Tensor, ...] | None:
    """Draw seeded random numbers in the shape of --sample: x, or q, k and v."""
    if shape is None:
        return None
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in shape.split(",")]
    if len(sizes) not in (2, 3, 4) or min(sizes) < 1:
        raise ConfigError(
            f"--sample must be the shape of x, T,WIDTH or B,T,WIDTH, or of q, k and v, B,H,T,WIDTH; got {shape!r}."
        )
    draw = torch.Generator().manual_seed(SEED)
    tensors = tuple(torch.randn(sizes, generator=draw) for _ in range(3))
    return tensors if len(sizes) == 4 else tensors[0]


@contextlib.contextmanager
def show_progress(subject: object, sample: object) -> Iterator[None]:
    """Show a bar of the number of runs of a whole model; a single layer is done before a bar would appear."""
    if not isinstance(subject, nn.Module) or not sys.stderr.isatty() or not whole_model.is_model(subject, sample):
        yield
        return
    runs: list[None] = []
    handle = subject.register_forward_hook(lambda *_: runs.append(None))
    try:
        with show_bar("examining", lambda: len(runs), whole_model.FORWARDS):
            yield
    finally:
        handle.remove()
