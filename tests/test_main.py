"""The door of the command line: `python -m regard`."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import regard.__main__

# says that an import has begun, and waits there to be interrupted; Ctrl-C as in a terminal, also where tests run behind it
SLOW = """
import importlib.abc, runpy, signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(600)

sys.meta_path.insert(0, Slow())
sys.argv = ["regard", "verify"]
runpy.run_module("regard", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["torch", "regard.cli.verify"])
def test_ctrl_c_while_it_is_still_importing_ends_it_quietly(module):
    command = [sys.executable, "-c", SLOW.format(module=module)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")


def test_ctrl_c_is_as_it_was_once_the_command_runs(monkeypatch):
    for before in (signal.default_int_handler, signal.SIG_IGN):
        found = []
        monkeypatch.setattr("regard.cli.main", lambda importing, found=found: found.append(signal.getsignal(signal.SIGINT)))
        first = signal.signal(signal.SIGINT, before)
        try:
            regard.__main__.main()
        finally:
            signal.signal(signal.SIGINT, first)
        assert found == [before]


def run_in_shell(line):
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHON": sys.executable}
    command = ["bash", "-c", line.replace("regard", '"$PYTHON" -m regard', 1)]
    return subprocess.run(command, capture_output=True, env=environment, encoding="utf-8", timeout=300, check=False)


def test_words_and_names_of_files_are_read_where_the_locale_has_no_letters_for_them(tmp_path):
    (tmp_path / "שלום.txt").write_text("one", encoding="utf-8")
    for text, letter in (("שלום🙂", "ש"), (tmp_path / "שלום.txt", "o")):
        done = run_in_shell(f"regard look {text} --model sorter")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{letter!r} is not a letter" in done.stderr


def test_a_process_without_standard_input_says_so_in_one_line():
    done = run_in_shell("regard look - <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"regard look: .*the text has no tokens.*\n", done.stderr), done.stderr


def test_a_command_without_memory_says_so_in_one_line(monkeypatch, capsys):
    def fail(importing: object) -> int:
        raise MemoryError

    monkeypatch.setattr("regard.cli.main", fail)
    monkeypatch.setattr(sys, "argv", ["regard", "look", "ab"])
    assert regard.__main__.main() == 2
    assert re.fullmatch(r"regard look: no memory is left: [^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize(("command", "own", "found"), [("generate", None, "1"), ("serve", "0", "0"), ("train", None, None)])
def test_commands_that_read_all_weights_for_each_token_ask_for_large_pages(monkeypatch, command, own, found):
    monkeypatch.setattr("regard.cli.main", lambda importing: 0)
    monkeypatch.setattr(sys, "argv", ["regard", command])
    with monkeypatch.context() as context:
        context.setenv("THP_MEM_ALLOC_ENABLE", own or "")  # restored at the end, also if it was not set
        if own is None:
            context.delenv("THP_MEM_ALLOC_ENABLE")
        regard.__main__.main()
        assert os.environ.get("THP_MEM_ALLOC_ENABLE") == found


def test_the_command_and_the_module_behave_the_same():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert EntryPoint("regard", project["scripts"]["regard"], "console_scripts").load() is regard.__main__.main
