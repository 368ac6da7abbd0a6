"""Atomic writes of files and folders: written into a hidden folder beside the target, then renamed onto it.

The hidden folder, `.NAME.MACHINE-RANDOM.partial`, belongs to one save. The saving process holds a lock on it, which ends with
the process, and the next save of the same name on the same machine removes those that no process has locked. Those of other
machines stay, and those on a file system without locks, since it is unknown whether their process still runs.
"""

import _thread
import errno
import os
import platform
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, NEW, FORMER, SUFFIX = ".lock-of-a-save", "new", "former", ".partial"  # names in a hidden folder, and its suffix
MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"
ERROR_NUMBER = re.compile(r"\[Errno \d+\] | \(os error \d+\)")  # as Python and Rust print it
RENAMING = threading.Lock()  # so that two threads that save the same files do not mix them


@contextmanager
def write_atomically(*places: Path) -> Iterator[list[Path]]:
    """Yield paths in a hidden folder to write to, which are renamed onto the places, in this order, if the block succeeds.

    What was at the places stays until then, and for good if the block raises or the process is killed. Raises
    FileExistsError, before anything is written, if a place is a folder, a device or a pipe.
    """
    for place in places:
        if place.exists() and not place.is_file():
            raise FileExistsError(errno.EEXIST, "it already exists and is not a file", str(place))
    first = {place.parent: place for place in reversed(places)}  # a place in each folder
    with lock_hidden_folders(*first.values()) as folders:
        hidden = dict(zip(first, folders, strict=True))
        partials = [hidden[place.parent] / place.name for place in places]
        modes = [find_new_file_mode(path) for path in partials]
        yield partials
        run_uninterrupted(replace_files, partials, modes, places)


def replace_files(partials: Sequence[Path], modes: Sequence[int], places: Sequence[Path]) -> None:
    """Write files to the disk and rename them onto their places."""
    for path, mode in zip(partials, modes, strict=True):
        path.chmod(mode)
        write_to_disk(path)
    with RENAMING:
        for path, place in zip(partials, places, strict=True):
            os.replace(path, place)


def write_to_disk(path: Path) -> None:
    """Return once the contents of a file are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_failed_write(what: str, place: Path | str, error: Exception) -> str:
    """Return a sentence on what could not be written to a place, and why, without the number of the error."""
    why = ERROR_NUMBER.sub("", getattr(error, "strerror", None) or str(error))
    return f"{what} could not be written to {place}: {why}. Nothing was changed there: make space, or choose another file."


@contextmanager
def write_folder_atomically(place: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed onto its place, replacing a former one, if the block succeeds."""
    with lock_hidden_folders(place) as (hidden,):
        (hidden / NEW).mkdir()
        yield hidden / NEW
        run_uninterrupted(replace_folder, hidden, place)


def replace_folder(hidden: Path, place: Path) -> None:
    """Write the new folder to the disk and rename it onto its place."""
    for path in (hidden / NEW).iterdir():
        write_to_disk(path)
    with RENAMING:
        rename_folder(hidden, place)


def rename_folder(hidden: Path, place: Path) -> None:
    """Rename the new folder onto its place, and a former one out of it; of several processes each may be the last."""
    for attempt in range(100):
        with suppress(FileNotFoundError):
            os.replace(place, hidden / f"{FORMER}-{attempt}")
        try:
            os.replace(hidden / NEW, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                restore_former_folder(hidden, place)
                raise
        else:
            return
    raise OSError(errno.EBUSY, "other processes keep replacing it", str(place))


def restore_former_folder(hidden: Path, place: Path) -> None:
    """Rename the last former folder back, unless something took its place."""
    for former in sorted(hidden.glob(f"{FORMER}-*"), reverse=True):
        if not place.exists():
            os.replace(former, place)


@contextmanager
def lock_hidden_folders(*places: Path) -> Iterator[list[Path]]:
    """Make and lock a hidden folder beside each place, and remove them at the end; first remove those of ended processes."""
    folders = [HiddenFolder(place) for place in places]
    try:
        try:
            for folder in folders:
                run_uninterrupted(folder.create)
            yield [folder.path for folder in folders]
        finally:
            for folder in folders:
                run_uninterrupted(folder.remove)
    finally:
        for folder in folders:
            folder.remove()  # unless that has, as an interrupt may come before it has begun


class HiddenFolder:
    """A hidden folder beside a place, and the handle of the lock on it."""

    path: Path
    handle: int

    def __init__(self, place: Path) -> None:
        self.place, self.exists, self.is_locked = place, False, False

    def create(self) -> None:
        """Make and lock the folder."""
        remove_leftovers(self.place)
        while not self.is_locked:
            self.path = Path(tempfile.mkdtemp(SUFFIX, make_prefix(self.place), self.place.parent))
            self.exists = True
            with suppress(FileNotFoundError):  # another save removed it before it was locked
                self.handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                acquire_lock(self.handle, wait=True)
                self.is_locked = (self.path / LOCK).exists()
                if not self.is_locked:
                    os.close(self.handle)

    def remove(self) -> None:
        """Unlock and remove the folder, if it is there."""
        if self.is_locked:
            self.is_locked = False
            os.close(self.handle)  # before removing: a network file system keeps the name of an open file
        if self.exists:
            shutil.rmtree(self.path, ignore_errors=True)
            self.exists = False


def run_uninterrupted(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function where no signal handler runs, such as that of Ctrl-C: in a thread other than the main one.

    Its error is raised. What a handler raises meanwhile comes out once the function has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        function(*arguments)
        return
    turns, outcomes, end = [None], list[BaseException | None](), threading.Lock()
    end.acquire()

    def run() -> None:
        with suppress(IndexError):
            turns.pop()
            try:
                function(*arguments)
            except BaseException as error:  # raised below
                outcomes.append(error)
            outcomes.append(None)
            end.release()

    try:
        _thread.start_new_thread(run, ())  # an interrupted threading.Thread or Event can keep its lock for good
        end.acquire()
    except RuntimeError:  # no thread can be started, as when Python ends
        run()
    finally:
        try:
            turns.pop()  # interrupted before the function has begun, which it does not do any more
        except IndexError:
            if not outcomes:
                end.acquire()
    if outcomes[0] is not None:
        raise outcomes[0]


def remove_leftovers(place: Path) -> None:
    """Remove the hidden folders of a place whose process has ended.

    A former folder in one is renamed back if nothing is at its place.
    """
    name = re.compile(re.escape(make_prefix(place)) + r"[a-z0-9_]{8}" + re.escape(SUFFIX))
    try:
        with os.scandir(place.parent) as entries:
            found = [Path(one) for one in entries if name.fullmatch(one.name) and one.is_dir(follow_symlinks=False)]
    except OSError:  # the save itself raises it
        return
    for hidden in found:
        with suppress(OSError):
            hidden.rmdir()  # empty: its process ended before it made a lock
            continue
        with suppress(OSError):
            remove_unlocked_folder(hidden, place)


def remove_unlocked_folder(hidden: Path, place: Path) -> None:
    """Remove a hidden folder if no process holds its lock."""
    lock = os.open(hidden / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        if acquire_lock(lock, wait=False):
            restore_former_folder(hidden, place)
            shutil.rmtree(hidden, ignore_errors=True)
    finally:
        os.close(lock)


def acquire_lock(handle: int, wait: bool) -> bool:
    """Return whether this process has the lock now; False if another one holds it, or the file system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def make_prefix(place: Path) -> str:
    """Return the prefix of the names of a place's hidden folders on this machine."""
    return f".{place.name}.{MACHINE}-"


def find_new_file_mode(path: Path) -> int:
    """Return the mode of a new file there; some writers, safetensors among them, make files only their owner can read."""
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    path.unlink()
    return mode
