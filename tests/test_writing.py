import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard.writing import whole


def test_a_former_file_stays_where_the_writing_fails(tmp_path):
    place = tmp_path / "a"
    place.write_text("former")
    with pytest.raises(UnicodeEncodeError), whole(place) as (beside,):
        beside.write_text("n\udcff", encoding="utf-8")
    assert place.read_text() == "former"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_of_several_files_none_takes_its_place_before_all_are_written(tmp_path):
    places = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(FileNotFoundError), whole(*places) as (a, _):
        a.write_text("new")  # and b never
    assert not any(place.exists() for place in places)
    with whole(*places) as (a, b):
        a.write_text("A")
        b.write_text("B")
        assert not any(place.exists() for place in places)
    assert [place.read_text() for place in places] == ["A", "B"]


def test_a_file_is_readable_to_whom_any_new_file_is_whatever_its_writer_does(tmp_path):
    with whole(tmp_path / "a") as (beside,):
        save_file({"w": torch.zeros(3)}, beside)
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_what_is_no_file_is_never_replaced(tmp_path):
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for place in (folder, pipe):
        with pytest.raises(FileExistsError, match="is no file"), whole(tmp_path / "a", place) as (beside, _):
            beside.write_text("never")
    assert pipe.is_fifo()
    assert folder.is_dir()
    assert not (tmp_path / "a").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from regard.writing import whole
with whole(Path(sys.argv[1])) as (beside,):
    beside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_that_is_killed_leaves_the_former_file(tmp_path: Path):
    place = tmp_path / "a"
    place.write_text("former")
    died = subprocess.run([sys.executable, "-c", KILLED, str(place)], env={**os.environ}, check=False)
    assert died.returncode == -signal.SIGKILL
    assert place.read_text() == "former"
