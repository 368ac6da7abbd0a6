import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save_file

from regard import atomic_write
from regard.atomic_write import write_atomically, write_folder_atomically


def test_a_former_file_stays_where_the_writing_fails(tmp_path):
    place = tmp_path / "a"
    place.write_text("former")
    with pytest.raises(UnicodeEncodeError), write_atomically(place) as (beside,):
        beside.write_text("n\udcff", encoding="utf-8")
    assert place.read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_of_several_files_none_takes_its_place_before_all_are_written(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(FileNotFoundError), write_atomically(*places) as (a, _):
        a.write_text("new")  # and b never
    assert not any(place.exists() for place in places)
    with write_atomically(*places) as (a, b):
        a.write_text("A")
        b.write_text("B")
        assert not any(place.exists() for place in places)
    assert [place.read_text() for place in places] == ["A", "B"]


def test_a_file_is_readable_to_whom_any_new_file_is_whatever_its_writer_does(tmp_path):
    with write_atomically(tmp_path / "a") as (beside,):
        save_file({"w": torch.zeros(3)}, beside)
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_is_no_file_is_never_replaced(tmp_path):
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for place in (folder, pipe):
        with pytest.raises(FileExistsError, match="is not a file"), write_atomically(tmp_path / "a", place) as (beside, _):
            beside.write_text("never")
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert not (tmp_path / "a").exists()


def interrupt_at(number, function):
    """Call a function and raise KeyboardInterrupt at a line that runs while files are written; return whether there is one."""
    lines, files = itertools.count(), (atomic_write.__file__, contextlib.__file__, threading.__file__)

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


def write_two_files(folder, text):
    with write_atomically(folder / "a", folder / "b") as partials:
        for path in partials:
            path.write_text(text)


def write_folder(folder, text):
    with write_folder_atomically(folder / "a") as partial:
        (partial / "b").write_text(text)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no list of the open files of a process")
@pytest.mark.parametrize(("write", "names"), [(write_two_files, ["a", "b"]), (write_folder, ["a"])])
def test_an_interrupt_at_any_line_comes_out_and_leaves_nothing_beside_the_files(tmp_path, write, names):
    write(tmp_path, "0")
    gc.collect()
    handles = os.listdir("/proc/self/fd")
    for number in itertools.count():
        is_interrupted = interrupt_at(number, lambda text=f"{number}": write(tmp_path, text))
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert len({path.read_text() for path in tmp_path.rglob("?") if path.is_file()}) == 1
        if not is_interrupted:
            break
    assert number > 50
    assert os.listdir("/proc/self/fd") == handles


def begin(code: str, *arguments: object) -> subprocess.Popen:
    """Another Python, which says a line on its standard output when it has come to where it waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"waiting\n"
    return process


def end(process: subprocess.Popen, kill: bool) -> None:
    if kill:
        process.kill()
    process.communicate(b"go on\n", timeout=300)


HALF_A_FILE = """
import sys
from pathlib import Path
from regard.atomic_write import write_atomically
with write_atomically(Path(sys.argv[1])) as (beside,):
    beside.write_text("half")
    print("waiting", flush=True)
    sys.stdin.readline()
    beside.write_text("theirs")
"""

HALF_A_FOLDER = """
import os, sys
from pathlib import Path
from regard import atomic_write
with atomic_write.write_folder_atomically(Path(sys.argv[1])) as beside:
    (beside / "a").write_text("new")
    real = os.replace
    def replace(old, new):
        if str(new) == sys.argv[1]:  # the former folder is out of its place, the new one not in it
            print("waiting", flush=True)
            sys.stdin.readline()
        real(old, new)
    os.replace = replace
"""


def test_a_process_that_is_killed_leaves_the_former_file_and_the_next_save_removes_what_it_wrote(tmp_path):
    place = tmp_path / "a"
    place.write_text("former")
    end(begin(HALF_A_FILE, place), kill=True)
    assert place.read_text() == "former"
    assert len(list(tmp_path.iterdir())) == 2
    with write_atomically(tmp_path / "b") as (beside,):
        beside.write_text("another place")
    assert len(list(tmp_path.iterdir())) == 3
    with write_atomically(place) as (beside,):
        beside.write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert place.read_text() == "new"


def test_what_a_process_is_still_writing_is_left_to_it(tmp_path):
    place = tmp_path / "a"
    process = begin(HALF_A_FILE, place)
    with write_atomically(place) as (beside,):
        beside.write_text("ours")
    assert place.read_text() == "ours"
    end(process, kill=False)
    assert process.returncode == 0
    assert place.read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_another_machine_is_writing_is_left_to_it(tmp_path, monkeypatch):
    place = tmp_path / "a"
    end(begin(HALF_A_FILE, place), kill=True)
    monkeypatch.setattr(atomic_write, "MACHINE", "0123abcd")
    with write_atomically(place) as (beside,):
        beside.write_text("ours")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_process_killed_between_two_names_leaves_a_folder_that_the_next_save_finds(tmp_path):
    place = tmp_path / "a"
    with write_folder_atomically(place) as beside:
        (beside / "a").write_text("former")
    end(begin(HALF_A_FOLDER, place), kill=True)
    assert not place.exists()
    with pytest.raises(ZeroDivisionError), write_folder_atomically(place) as beside:
        1 / 0  # noqa: B018
    assert (place / "a").read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize("save", ["files", "a folder"])
def test_of_threads_that_save_the_same_place_each_succeeds_and_a_reader_never_finds_half_of_one(tmp_path, save):
    places = [tmp_path / "a", tmp_path / "b"]
    found, over = [], threading.Event()

    def save_files(text):
        with write_atomically(*places) as (a, b):
            a.write_text(text)
            b.write_text(text)

    def save_folder(text):
        with write_folder_atomically(tmp_path / "folder") as beside:
            (beside / "a").write_text(text)

    def read():
        while not over.is_set():
            with suppress(FileNotFoundError):
                found.append(len((tmp_path / ("a" if save == "files" else "folder/a")).read_text()))

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(5) as threads:
        list(threads.map(save_files if save == "files" else save_folder, [letter * 200_003 for letter in "abcdefg" * 20]))
    over.set()
    reader.join()
    assert set(found) == {200_003}
    if save == "files":
        assert places[0].read_text() == places[1].read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    else:
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


MANY_FILES = """
import sys
from pathlib import Path
from regard.atomic_write import write_atomically
print("waiting", flush=True)
sys.stdin.readline()
for _ in range(40):
    with write_atomically(Path(sys.argv[1])) as (beside,):
        beside.write_text(sys.argv[2] * 200_003)
"""


@pytest.mark.slow
def test_of_processes_that_save_the_same_place_each_succeeds_whoever_is_killed(tmp_path):
    place = tmp_path / "a"
    processes = [begin(MANY_FILES, place, letter) for letter in "abcd"]
    for process in processes:
        process.stdin.write(b"go on\n")
        process.stdin.flush()
    while not place.exists():
        assert processes[0].poll() is None
    processes[0].kill()
    assert [process.wait(60) for process in processes[1:]] == [0, 0, 0]
    assert place.read_text() in [letter * 200_003 for letter in "abcd"]
    with write_atomically(place) as (beside,):
        beside.write_text("last")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    for process in processes:
        process.communicate()


def test_a_file_system_without_locks_is_written_to_and_what_is_left_there_stays(tmp_path, monkeypatch):
    place = tmp_path / "a"
    end(begin(HALF_A_FILE, place), kill=True)
    monkeypatch.setattr(atomic_write, "fcntl", None)
    with write_atomically(place) as (beside,):
        beside.write_text("new")
    assert place.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2
