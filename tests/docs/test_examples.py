"""The examples of the documentation and of the README, run from top to bottom, each page with its own names.

A `python` block runs; the output shown in a `pycon` block and after each `$ regard` of a `console` block is compared.
A command that ends with another code than 0 says so in a comment, `# exit code 1`, or on standard error.
"""

import doctest
import re
import shlex
from pathlib import Path

import pytest

import regard.cli

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(r"^```(python|pycon|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def quiet_place(tmp_path, monkeypatch, screen_of_80_columns):
    """A folder for what an example writes, and a screen of 80 columns without colour."""
    monkeypatch.chdir(tmp_path)


def blocks(page):
    """The kind, the text and the line of every block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [(found[1], found[2], text.count("\n", 0, found.start()) + 1) for found in BLOCK.finditer(text)]


def run_python(text, names, page, line):
    exec(compile("\n" * line + text, str(page), "exec"), names)


def run_pycon(text, names, page, line):
    test = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), line)
    told = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=told.append, clear_globs=False)
    names |= test.globs
    assert not told, "".join(told)


def run_console(text, page, line, capsys):
    for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        typed, _, expected = command.partition("\n")
        program, *arguments = shlex.split(typed, comments=True)
        if program != "regard" or arguments[0] == "serve":
            continue  # what installs, builds, tests, or serves until it is told to end, is run elsewhere
        code = regard.cli.main(arguments)
        said = capsys.readouterr()
        came = said.out + said.err
        stated = re.search(r"# exit code (\d+)", typed)
        expected_code = int(stated[1]) if stated else code if said.err else 0
        assert code == expected_code, f"{page.name}:{line}: {typed} ended with {code}"
        if not expected.strip():
            assert came, f"{page.name}:{line}: {typed} printed nothing"
            continue  # no output is shown, and so none is compared
        assert doctest.OutputChecker().check_output(expected, came, FLAGS), f"{page.name}:{line}: {typed} printed\n{came}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_runs_and_prints_what_is_shown(page, capsys):
    names = {"__name__": "__main__"}
    for kind, text, line in blocks(page):
        if kind == "python":
            run_python(text, names, page, line)
            capsys.readouterr()
        elif kind == "pycon":
            run_pycon(text, names, page, line)
        else:
            run_console(text, page, line, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_is_of_a_kind_that_is_known(page):
    fences = re.findall(r"^```(\S*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*fences[::2]} <= {"python", "pycon", "console", "text", "{eval-rst}", "{toctree}"}


def test_an_output_that_is_not_the_one_shown_is_noticed():
    with pytest.raises(AssertionError, match="Expected"):
        run_pycon(">>> 1 + 1\n3\n", {}, Path("page.md"), 1)


def test_an_exception_in_an_example_is_noticed():
    with pytest.raises(ZeroDivisionError):
        run_python("1 / 0", {}, Path("page.md"), 1)


def test_a_command_that_prints_something_else_is_noticed(capsys):
    with pytest.raises(AssertionError, match=r"page\.md:7: regard verify softmax-211 printed"):
        run_console("$ regard verify softmax-211\nall is well\n", Path("page.md"), 7, capsys)


def test_a_command_that_ends_with_another_code_than_stated_is_noticed(capsys):
    with pytest.raises(AssertionError, match="ended with 0"):
        run_console("$ regard verify softmax-211  # exit code 1\n...\n", Path("page.md"), 7, capsys)


def test_a_command_that_fails_silently_is_noticed(monkeypatch, capsys):
    monkeypatch.setattr(regard.cli, "main", lambda arguments: 1)
    with pytest.raises(AssertionError, match="ended with 1"):
        run_console("$ regard verify\n", Path("page.md"), 7, capsys)
