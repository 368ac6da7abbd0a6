"""How far a model of transformers is loaded, which counts its parts for a progress bar."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class LoadingProgress:
    """A progress bar of transformers that only counts: `done` of `total` parts, 0 while the total is not known.

    `label` names what is loaded.
    """

    def __init__(self, label: str = "") -> None:
        self.label, self.done, self.total = label, 0, 0
        self._parts: Iterable[Any] = ()

    def start(self, factory: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> "LoadingProgress":
        """Count from 0, in place of the bar that transformers would make of these arguments."""
        self._parts = arguments[0] if arguments else options.get("iterable") or ()
        self.done, self.total = 0, int(options.get("total") or getattr(self._parts, "__len__", int)())
        return self

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield part
            self.done += 1

    def update(self, count: int = 1) -> None:
        """Count more parts."""
        self.done += count

    def __enter__(self) -> "LoadingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: None  # what else a bar can do


@contextmanager
def track_loading(progress: LoadingProgress) -> Iterator[None]:
    """Count what transformers loads in the context; a version without hooks for its bars is not counted."""
    set_hook = getattr(import_module("transformers.utils.logging"), "set_tqdm_hook", None)
    if set_hook is None:
        yield
        return
    previous = set_hook(progress.start)
    try:
        yield
    finally:
        set_hook(previous)
