"""The lock of a run's folder: one process trains in it at a time, and one that is killed releases it.

It is the operating system's lock (flock, or its equivalent on Windows) on the file `.lock`; `.process` names the holder, for
error messages in other processes. Of several processes of torchrun the first holds it for all.
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
    """The lock of a folder for this process, released when the object is garbage collected."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_training = folder, False
        self.made_folder = not folder.exists()
        self._file = FileLock(folder / LOCK, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Acquire the lock; raise ConfigError if another process holds it."""
        if self._file.is_locked:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.acquire()
            (self.folder / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8")
        except Timeout:  # a subclass of OSError, so caught first
            raise ConfigError(
                f"{self.folder} is in use: {describe_holder(self.folder)} trains in it. Wait until it has ended, end it, or "
                "name another folder as out."
            ) from None
        except NotImplementedError:
            raise ConfigError(f"{self.folder} is on a file system without locks: name a folder elsewhere as out.") from None
        except OSError as error:
            raise ConfigError(f"out is {self.folder}, where nothing can be written: {error.strerror or error}.") from None

    def release(self) -> None:
        """Release the lock; its files stay, because another process may be waiting for them."""
        self._file.release(force=True)

    @contextmanager
    def hold_for_training(self) -> Iterator[None]:
        """Hold the lock for one training loop; raise ConfigError if another loop of this process holds it."""
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
        """Release the lock before anything was written; delete the folder if it is new and otherwise empty."""
        if self.is_training:
            return
        if self.made_folder and {path.name for path in self.folder.iterdir()} <= {LOCK, HOLDER}:
            for name in (LOCK, HOLDER):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
        self.release()


LOCKS: "weakref.WeakValueDictionary[Path, RunLock]" = weakref.WeakValueDictionary()  # locks of this process


def lock_run(folder: Path) -> RunLock:
    """Acquire and return the lock of a run's folder; raise ConfigError if another process holds it."""
    found = LOCKS.get(folder.resolve())
    if found is None:
        LOCKS[folder.resolve()] = found = RunLock(folder)
    elif found.is_training:
        raise ConfigError(f"{folder} is in use: this process trains in it already. Name another folder as out.")
    found.acquire()
    return found


def describe_holder(folder: Path) -> str:
    """Describe the process that holds a lock, as far as its file tells."""
    try:
        holder = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {int(holder['pid'])} on {str(holder['host']) or 'this machine'}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"
