"""A progress bar on stderr for work that takes longer than two seconds."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from regard.show.terminal import open_console
from regard.terminal_escapes import ReaderGoneError

DELAY_SECONDS, EVERY_SECONDS = 2.0, 0.2

T = TypeVar("T")


@contextmanager
def show_bar(label: str, done: Callable[[], int], total: int | Callable[[], int]) -> Iterator[None]:
    """Show a bar of done() out of total within the context, after two seconds; none if stderr is not a terminal.

    A total that is not known at first is a function.
    """
    if not sys.stderr.isatty():
        yield
        return
    over = threading.Event()
    bar = threading.Thread(target=draw_bar, args=(label, done, total, over, sys.stderr), daemon=True)
    bar.start()
    try:
        yield
    finally:
        over.set()
        bar.join()


@contextmanager
def show_count_bar(label: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar within the context, and yield the function that updates its count, which ignores other arguments."""
    done = [0]

    def set_count(count: int, *others: object) -> None:
        done[0] = count

    with show_bar(label, lambda: done[0], total):
        yield set_count


def draw_bar(
    label: str, done: Callable[[], int], total: int | Callable[[], int], over: threading.Event, stream: IO[str]
) -> None:
    """Show the bar on a stream until `over` is set."""
    if over.wait(DELAY_SECONDS):
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    is_ours = sys.stderr is stream  # else it was redirected, and rich would take it back, and restore it too late
    bar = Progress(*columns, console=open_console(stream), transient=True, redirect_stderr=is_ours)
    with suppress(ReaderGoneError), bar as progress:
        task = progress.add_task(label, total=None)
        while not over.wait(EVERY_SECONDS):
            progress.update(task, completed=done(), total=total if isinstance(total, int) else total() or None)


def iterate_with_bar(label: str, items: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items, with a bar of their number."""
    count = 0
    with show_bar(label, lambda: count, total):
        for item in items:
            count += 1
            yield item
