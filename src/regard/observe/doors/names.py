"""Names that stand for something else while anyone, in any thread, needs them to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

Patch = tuple[Any, str, Any]  # owner, name, what is to stand there


class Names:
    """Names that stand for something of ours while it is entered; entered by several, until the last of them leaves."""

    def __init__(self, patches: Callable[[], list[Patch]]) -> None:
        self.patches = patches
        self.lock = threading.RLock()
        self.former: list[tuple[Any, str, bool, Any, Any]] = []  # owner, name, whether it was its own, what it was, ours
        self.users = self.absent = 0

    def __enter__(self) -> "Names":
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.add(self.patches())
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.restore()
                self.former.clear()

    def add(self, patches: list[Patch]) -> None:
        """Puts ours in the place of what they were."""
        with self.lock:
            for owner, name, ours in patches:
                was = vars(owner).get(name)
                if isinstance(ours, FunctionType):
                    vars(ours)["_torchdynamo_inline"] = was  # torch.compile sees through it
                self.former.append((owner, name, name in vars(owner), was, ours))
                setattr(owner, name, ours)

    def restore(self) -> None:
        """Every name is what it was, but for those that the program has set anew."""
        for owner, name, own, was, ours in reversed(self.former):
            if vars(owner).get(name) is ours:
                setattr(owner, name, was) if own else delattr(owner, name)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which every name is what it was."""
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
