"""Attribute patches that are in place while at least one user, in any thread, needs them."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FunctionType
from typing import Any

AttributePatch = tuple[Any, str, Any]  # owner, attribute name, replacement


def wait_for_import(name: str) -> None:
    """Return once no other thread is importing a module: until then it has only some of its names."""
    if name in sys.modules:
        with suppress(ImportError):  # the other thread's import failed
            import_module(name)


class PatchSet:
    """A set of attribute patches: the first user to enter applies them, the last one to leave restores the originals."""

    def __init__(self, patches: Callable[[], list[AttributePatch]]) -> None:
        self.patches = patches
        self.lock = threading.RLock()
        self.former: list[tuple[Any, str, bool, Any, Any]] = []  # owner, name, whether its own, original, ours
        self.users = self.absent = 0

    def __enter__(self) -> "PatchSet":
        with self.lock:
            if not self.users:
                try:
                    self.apply(self.patches())
                except BaseException:  # else the next user would find no patches and apply none
                    self.restore()
                    self.former.clear()
                    raise
            self.users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.restore()
                self.former.clear()

    def apply(self, patches: list[AttributePatch]) -> None:
        """Set the attributes to their replacements and remember the originals."""
        with self.lock:
            for owner, name, ours in patches:
                was = vars(owner).get(name)
                if isinstance(ours, FunctionType):
                    vars(ours)["_torchdynamo_inline"] = was or getattr(owner, name)  # torch.compile inlines the original
                self.former.append((owner, name, name in vars(owner), was, ours))
                setattr(owner, name, ours)

    def restore(self) -> None:
        """Set every attribute back to its original, except those that the program has since set itself."""
        for owner, name, own, was, ours in reversed(self.former):
            if vars(owner).get(name) is ours:
                setattr(owner, name, was) if own else delattr(owner, name)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Restore the original attributes while the context is active."""
        with self.lock:
            self.absent += 1
            if self.absent == 1:
                self.restore()
        try:
            yield
        finally:
            with self.lock:
                self.absent -= 1
                for owner, name, own, was, ours in [] if self.absent else self.former:
                    if (name in vars(owner), vars(owner).get(name)) == (own, was):
                        setattr(owner, name, ours)
