"""What commands print of names, words and texts that came from a file: shown, and never obeyed by a terminal."""

import os
import re
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from generate.small_models import gpt2
from regard import load
from regard.cli import main
from regard.models.recurrent import RecurrentTranslator
from regard.text import BytePair
from regard.text.letters import Letters
from show.small_recordings import record_small_model
from text.pairs.small_pairs import make_pairs

CLIPBOARD = "\x1b]52;c;aGVsbG8=\x07"  # a terminal that obeys puts "hello" on the clipboard
HOSTILE = f"a{CLIPBOARD}\x9b2J\r\u202eb\u2028\x7f"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TEXT = "the cat sat on the mat, and the dog saw the cat again. "
TRAINING = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "12",
    "--context",
    "11",
    "--batch",
    "3",
    "--steps",
    "3",
    "--sample-every",
    "1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with a hostile name, and in it a recording, models and texts whose names and words are hostile too."""
    place = tmp_path_factory.mktemp("place") / HOSTILE
    place.mkdir()
    recording = load_copy(place / "whole.reg")
    recording.model, recording.tokens = HOSTILE + "\udcff", [HOSTILE + "\udcff", *recording.tokens[1:]]
    for strand in recording.last.histories.values():
        strand.name = strand.name.replace("blocks", HOSTILE + "\udcff")
    recording.last.histories = {(one.name, *key[1:]): one for key, one in recording.last.histories.items()}
    recording.save(place / "hostile.reg")
    (place / "damaged.reg").write_bytes((place / "hostile.reg").read_bytes()[:-1])
    alphabet = "".join(dict.fromkeys(HOSTILE + TEXT))
    letters = gpt2(vocabulary=len(alphabet), width=32, heads=4, layers=2, context=31, dtype=torch.float32)
    letters.text = Letters(alphabet)
    letters.save(place / "letters")
    translator = RecurrentTranslator("additive", vocabulary=280, width=8, hidden=9)
    translator.text = BytePair.train([side for pair in make_pairs(60) for side in pair], 280)
    translator.save(place / "translator")
    (place / f"{HOSTILE}.txt").write_text((HOSTILE.replace("\r", "") + TEXT) * 20)  # a \r would be read as the end of a line
    return place


def load_copy(path):
    record_small_model().save(path)
    return load(path)


COMMANDS = {
    "heads": ["heads", "hostile.reg", "--all"],
    "one head": ["heads", "hostile.reg", "--head", "0.1", "--query", "3"],
    "heads of a damaged file": ["heads", "damaged.reg"],
    "look": ["look", HOSTILE + TEXT[:9], "--model", "letters", "--all"],
    "look at a word": ["look", HOSTILE, "--model", "letters", "--head", "0.1", "--query", "2"],
    "walk": ["walk", "--words", f"a {HOSTILE} b", "--query", "2"],
    "walk without such a word": ["walk", "--words", "a b", "--query", HOSTILE],
    "generate": ["generate", "the cat", "--model", "letters", "--tokens", "24", "--seed", "1"],
    "generate, looking": ["generate", "the cat", "--model", "letters", "--tokens", "9", "--top", "3", "--look", "--seed", "1"],
    "generate from nothing": ["generate", HOSTILE, "--model", HOSTILE],
    "evaluate": ["evaluate", "--model", "letters", "--on", f"{HOSTILE}.txt"],
    "evaluate nothing": ["evaluate", "--model", "letters", "--on", HOSTILE],
    "translate": ["translate", "1 one", "2 two three", HOSTILE, "--model", "translator"],
    "translate with nothing": ["translate", "one", "--model", HOSTILE],
    "train": ["train", "--text", f"{HOSTILE}.txt", "--out", HOSTILE, *TRAINING],
    "train on nothing": ["train", "--text", HOSTILE],
    "serve": ["serve", "damaged.reg"],
    "examine": ["examine", f"{HOSTILE}.py:{HOSTILE}"],
    "verify": ["verify", HOSTILE],
    "no command": [HOSTILE],
}

RANDOM = ("generate", "generate, looking", "translate")  # write whatever a model with random weights likes


def resolve_arguments(folder, command):
    """The arguments of a command, with the paths of the files that there are."""
    return [str(folder / one) if (folder / one).exists() else one for one in COMMANDS[command]]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_hands_a_terminal_what_it_would_obey(command, folder, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    try:
        code = main(resolve_arguments(folder, command))
    except SystemExit as end:
        code = end.code
    said = capfd.readouterr()
    assert code in (0, 2)
    assert said.out or said.err
    assert STEERING.findall(said.out + said.err) == []
    assert code == 0 or len(said.err) < 3_000
    shown = "".join((said.out + said.err).split())  # a long name is broken over lines
    assert "\\x1b]52" in shown or command in RANDOM


def run(arguments, **settings):
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "ascii"}
    return subprocess.run(
        [sys.executable, "-m", "regard", *arguments], capture_output=True, env=environment, timeout=300, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["heads", "heads of a damaged file", "generate", "evaluate nothing"])
def test_a_terminal_that_has_only_ascii_is_given_only_ascii(command, folder):
    done = run(resolve_arguments(folder, command))
    assert done.returncode in (0, 2)
    assert b"Traceback" not in done.stderr
    assert STEERING.findall((done.stdout + done.stderr).decode("ascii")) == []


def read_to_end(handle):
    """What comes from a terminal until its other end is closed, which Linux says by an error."""
    with suppress(OSError):
        while part := os.read(handle, 2**16):
            yield part


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo terminals")
@pytest.mark.slow
@pytest.mark.parametrize("command", ["heads", "look"])
def test_a_terminal_gets_colours_and_no_other_sequence(command, folder):
    ours, theirs = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-m", "regard", *resolve_arguments(folder, command)],
        stdout=theirs,
        stderr=subprocess.PIPE,  # where no bar is drawn
        env={**environment, "COLUMNS": "120", "TERM": "xterm-256color"},
    ) as process:
        os.close(theirs)
        came = b"".join(read_to_end(ours))
        assert process.stderr.read() == b""
    os.close(ours)
    assert process.returncode == 0
    shown = re.sub("\x1b\\[[0-9;]*m", "", came.decode())
    assert shown != came.decode()
    assert STEERING.findall(shown.replace("\r\n", "\n")) == []
    assert "\\x1b]52" in shown


LATER = [pytest.param(one, marks=pytest.mark.slow) for one in (["info"], ["info", "--json"], ["walk"], ["verify", "--json"])]


@pytest.mark.parametrize("arguments", [["--help"], ["look", "--help"], *LATER])
def test_a_reader_that_leaves_at_once_ends_a_command_quietly(arguments):
    script = f'"$0" -m regard {" ".join(arguments)} | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script, sys.executable], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [["--help"], *LATER[:1]])
def test_a_disk_that_is_full_is_said_and_2(arguments):
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "regard", *arguments], stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == 2
    assert b"the output could not be written: No space left on device. Make space, or write it elsewhere." in done.stderr
    assert b"Errno" not in done.stderr
    assert done.stderr.count(b"\n") == 1
