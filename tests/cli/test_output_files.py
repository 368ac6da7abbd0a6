import os
import subprocess
import sys

import pytest
from PIL import Image

from regard.cli import main

COMMANDS = {"see": ["see", "3"], "audit": ["audit", "The cat sat on the mat.", "--policy", "oracle:budget=2", "--worst", "0"]}
FLAGS = [
    (["look", "The cat sat."], "--out"),
    (["look", "The cat sat."], "--page"),
    (COMMANDS["see"], "--out"),
    (COMMANDS["see"], "--page"),
    (COMMANDS["audit"], "--page"),
]
LIMIT = 2000  # bytes of a file
RUN = "from regard.cli import main; raise SystemExit(main(sys.argv[1:]))"


@pytest.fixture(params=COMMANDS)
def command(request):
    return COMMANDS[request.param]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("figure.foo", "that ends in .png, .svg or .pdf"),
        ("figure", "that ends in .png, .svg or .pdf"),
        ("", "that ends in .png, .svg or .pdf"),
        ("missing/figure.png", "in an existing folder"),
        ("folder.png", "in an existing folder"),
    ],
)
def test_a_figure_that_cannot_be_saved_is_refused_before_the_model_is_loaded(
    capsys, tmp_path, monkeypatch, command, name, expected
):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    code = main([*command, "--model", "no model", "--figure", name])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err == f"regard {command[0]}: --figure must be a file {expected}, got {name}.\n"
    assert [one.name for one in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize("name", ["missing/file", "folder", "file/below"])
@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    capsys, tmp_path, monkeypatch, command, flag, name
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    code = main([*command, "--model", "no model", flag, name])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err == f"regard {command[0]}: {flag} must be a file in an existing folder, got {name}.\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("name", ["/dev/null", "pipe"])
@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_a_device_or_a_pipe_is_refused_before_the_model_is_loaded(capsys, tmp_path, monkeypatch, command, flag, name):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code = main([*command, "--model", "no model", flag, name])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    expected = f"{flag} must be a new file or one to replace, got {name}, which is a device or a pipe. Choose another file."
    assert err == f"regard {command[0]}: {expected}\n"
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flag", "what"),
    [
        (["look", "The cat sat."], "--out", "the recording"),
        (["look", "The cat sat."], "--page", "the page"),
        (["see", "3"], "--figure", "the figure"),
    ],
)
def test_a_full_disk_leaves_the_earlier_file_and_names_the_cause(tmp_path, command, flag, what):
    place = tmp_path / "file.png"
    place.write_text("earlier")
    limited = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT})); {RUN}"
    run = [sys.executable, "-B", "-c", limited, *command, flag, str(place)]  # -B: no module may be cached in part
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"regard {command[0]}: {what} could not be written to {place}: ")
    assert last.endswith("File too large. Nothing was changed there: make space, or choose another file.")
    assert "rrno" not in last
    assert place.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("ending", ["png", "svg", "PDF"])
def test_a_figure_is_saved_in_the_format_of_its_suffix(capsys, tmp_path, command, ending):
    path = tmp_path / f"figure.{ending}"
    assert main([*command, "--figure", str(path)]) == 0
    assert capsys.readouterr().err == ""
    if ending == "png":
        with Image.open(path) as drawn:
            assert drawn.format == "PNG"
            assert drawn.width > 300
    else:
        assert (b"<svg" if ending == "svg" else b"%PDF") in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]
