"""The lock of a run's folder: one process trains in it at a time, and one that is killed leaves it free.

It is the operating system's (flock, or its like on Windows), on the file `.lock`; `.process` says who holds it, for the error
of another process. Of several processes of torchrun the first holds it for all.
"""

import json
import os
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from regard.errors import ConfigError

LOCK, HOLDER = ".lock", ".process"


class RunLock:
    """The lock of a folder, for this process; what forgets it gives it up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_training = folder, False
        self.made_folder = not folder.exists()
        self._file = FileLock(folder / LOCK, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Take the lock; ConfigError where another process has it."""
        if self._file.is_locked:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.acquire()
            (self.folder / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8")
        except Timeout:  # an OSError too
            raise ConfigError(
                f"{self.folder} is in use: {describe_holder(self.folder)} trains in it. Wait until it has ended, end it, or "
                "name another folder as out."
            ) from None
        except NotImplementedError:
            raise ConfigError(f"{self.folder} is on a file system without locks: name a folder elsewhere as out.") from None
        except OSError as error:
            raise ConfigError(f"out is {self.folder}, where nothing can be written: {error.strerror or error}.") from None

    def release(self) -> None:
        """Give the lock up; its files stay, since another process may wait for them."""
        self._file.release(force=True)

    @contextmanager
    def held_for_training(self) -> Iterator[None]:
        """A context of one loop; ConfigError where another loop of this process is inside."""
        if self.is_training:
            raise ConfigError(f"{self.folder} is in use: this process trains in it already. Name another folder as out.")
        self.acquire()
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False
            self.release()

    def abandon(self) -> None:
        """Give the lock up before anything was made; a folder that is new and holds nothing else goes."""
        if self.is_training:
            return
        if self.made_folder and {path.name for path in self.folder.iterdir()} <= {LOCK, HOLDER}:
            for name in (LOCK, HOLDER):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
        self.release()


HELD: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()  # of this process


def lock_run(folder: Path) -> RunLock:
    """Return the lock of a run's folder, which this process holds now; ConfigError where another one holds it."""
    found = HELD.get(folder.resolve())
    if found is None:
        HELD[folder.resolve()] = found = RunLock(folder)
    elif found.is_training:
        raise ConfigError(f"{folder} is in use: this process trains in it already. Name another folder as out.")
    found.acquire()
    return found


def describe_holder(folder: Path) -> str:
    """Return which process holds a lock, as far as it says."""
    try:
        said = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {int(said['pid'])} on {str(said['host']) or 'this machine'}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"
