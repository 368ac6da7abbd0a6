"""JSON lines: a file with a line per step, which a resumed run continues."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from regard.atomic_write import write_atomically
from regard.errors import DataError
from regard.train.checkpoint_header import is_count
from regard.train.training_state import Report, Training

LOG_NAME, HEADS_NAME = "log.jsonl", "heads.jsonl"  # in the folder of a run


class JsonLinesFile:
    """A file of JSON lines, one or more per step. Before the first write, lines of that step and later ones are removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cut = False

    def append_rows(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each row."""
        if not self._cut:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            truncate_log(self.path, step)
            self._cut = True
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


class ReportLog:
    """A listener that writes every report into log.jsonl."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesFile(path)

    def __call__(self, training: Training, report: Report) -> None:
        if training.is_first_process:
            self._lines.append_rows(report.step, [report.to_row()])


def truncate_log(path: Path, step: int) -> None:
    """Keep only the lines of the steps before `step`; an incomplete last line is removed."""
    if not path.is_file():
        return
    lines = [line for line, row in parse_lines(path) if row["step"] < step]
    with write_atomically(path) as (partial,):
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file of JSON lines."""
    if not path.is_file():
        raise DataError(f"{path} is missing, which training writes into its folder, out.")
    return [row for _, row in parse_lines(path)]


def parse_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each line with its row; raise DataError for an invalid line, except for the last, which may be incomplete."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            row = json.loads(line)
            if not is_count(row["step"]):
                raise ValueError("step is not a whole number")
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines) - 1:
                break
            raise DataError(
                f"{path}: line {number + 1} is not what training writes, a JSON object with the number of its step."
            ) from None
        if number < len(lines) - 1:  # a complete line ends with a line break
            found.append((line, row))
    return found
