"""regard examine: how it ends, whatever the subject does; a process of its own runs that."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from cli.layers_to_examine import write_layers
from regard.cli import main

PROGRAM = [sys.executable, "-W", "error", "-m", "regard", "examine"]
WAITING = re.compile(r"waiting in (\d+)")


@pytest.fixture
def file(tmp_path, monkeypatch):
    return write_layers(tmp_path, monkeypatch)


def run_examine(arguments, capfd):
    """The exit code, and what was printed."""
    try:
        code = main(["examine", *map(str, arguments)])
    except SystemExit as left:
        code = left.code
    shown = capfd.readouterr()
    return code, shown.out, shown.err


def is_running(number):
    """Whether a process runs; one that ended and is still listed does not."""
    try:
        os.kill(number, 0)
        with open(f"/proc/{number}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.slow
def test_a_finding_ends_with_1(file, capfd):
    code, out, err = run_examine([f"{file}:Leaking", "--args", 14, 6], capfd)
    assert code == 1
    assert "future leak" in out
    assert "masked_fill" in out
    assert out.startswith("running\n")  # what the file prints
    assert err == ""


@pytest.mark.slow
def test_json_is_the_whole_report_and_nothing_else(file, capfd):
    code, out, err = run_examine([f"{file}:Leaking", "--args", 14, 6, "--json"], capfd)
    record = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 1
    assert record["ok"] is False
    assert record["findings"][0]["kind"] == "future leak"
    assert "running" in err


@pytest.mark.slow
def test_sarif_is_one_json_document_and_what_the_file_prints_is_on_standard_error(file, capfd):
    code, out, err = run_examine([f"{file}:Leaking", "--args", 14, 6, "--format", "sarif"], capfd)
    assert code == 1
    assert json.loads(out)["version"] == "2.1.0"
    assert "running" in err


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_report_is_as_wide_as_the_terminal_or_80_columns(columns, file, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run_examine([f"{file}:Leaking", "--args", 14, 6], capfd)
    assert 0.75 * min(columns, 80) < max(map(len, out.splitlines())) <= min(columns, 80)


@pytest.mark.slow
def test_a_verdict_that_lacks_something_ends_with_3_unless_it_may(capfd):
    asked = ["regard:CausalAttention", "--args", 7, 5, 9, 0.0, "--sample", "2,1,7"]
    code, out, _ = run_examine(asked, capfd)
    assert code == 3
    assert out.startswith("CausalAttention: inconclusive")
    assert run_examine([*asked, "--no-strict"], capfd)[0] == 0


@pytest.mark.slow
def test_what_a_baseline_allows_is_no_finding_and_the_rest_is_annotated(tmp_path, capfd):
    asked, place = ["regard:SelfAttention", "--args", 7, 5, "--format", "github"], tmp_path / "baseline.json"
    code, out, _ = run_examine([*asked, "--write-baseline", place], capfd)
    assert code == 1
    assert re.match(r"::error file=.*self_attention.py,line=\d+,title=SelfAttention%3A future leak::", out)
    code, out, _ = run_examine([*asked, "--baseline", place], capfd)
    assert code == 0
    assert "::error" not in out
    assert "allowed: future leak (no reason)" in " ".join(out.split())
    assert run_examine([*asked, "--baseline", tmp_path / "none.json"], capfd)[0] == 2


@pytest.mark.slow
def test_a_model_is_examined_by_its_name(capfd):
    assert run_examine(["--model", "pocket", "regard:SelfAttention"], capfd)[0] == 2
    code, out, _ = run_examine(["--model", "pocket", "--format", "sarif"], capfd)
    assert code == 0
    assert json.loads(out)["runs"][0]["results"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["FILE:Attention", "--scale", "x"], "invalid float value"),
        (["FILE:Attention", "--time-limit", "0"], "a positive number of seconds, got 0"),
        (["FILE:Attention", "--time-limit", "nan"], "a positive number of seconds, got nan"),
        (["FILE:Attention"], "could not be created with no --args: TypeError"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_exit_code_2(arguments, says, file, capfd):
    code, _, err = run_examine([one.replace("FILE", str(file)) for one in arguments], capfd)
    assert code == 2
    assert says in err
    assert err.startswith("regard examine: ")
    assert err.count("\n") == 1


ENDS = [
    ("exits", "raises", "it raised SystemExit: 0 in line"),
    ("exits_at_once", "unfinished", "the process in which it ran ended with exit status 0"),
    pytest.param("is_interrupted", "raises", "it raised KeyboardInterrupt", marks=pytest.mark.slow),
    pytest.param("crashes", "unfinished", "the process in which it ran was ended by SIGSEGV", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind", "says"), ENDS)
def test_a_subject_that_ends_its_process_is_a_finding_and_the_rest_is_reported(how, kind, says, file, tmp_path, capfd):
    code, out, err = run_examine([f"{file}:Ending", "--args", how, "--page", tmp_path / "report.html"], capfd)
    told = " ".join(out.split())
    assert code == 1
    assert "Ending: 1 finding" in told
    assert f"{kind} {says}" in told
    assert "while examining its lengths" in told
    assert "checked - every output is finite" in told
    assert kind in (tmp_path / "report.html").read_text()
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["os._exit(0)", "import ctypes; ctypes.string_at(0)"])
def test_a_file_that_ends_its_process_as_it_is_run_is_exit_code_2(ending, file, capfd):
    file.write_text(f"import os\n{ending}")
    code, out, err = run_examine([f"{file}:Attention"], capfd)
    assert (code, out) == (2, "")
    assert "could not be loaded: the process in which it ran" in err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", pytest.param("holds_the_lock", marks=pytest.mark.slow)])
def test_a_subject_that_never_returns_from_c_is_ended_at_the_time_limit_and_the_line_is_reported(how, file, capfd):
    code, out, _ = run_examine([f"{file}:Ending", "--args", how, 0, "--time-limit", 5, "--json"], capfd)
    (finding,) = json.loads(out)["findings"]
    assert code == 1
    assert finding["kind"] == "unfinished"
    assert re.match(
        r"the time limit of 5 s was reached in line \d+ of attention_of_mine.py, while examining its ", finding["evidence"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("Leaking", 1), ("Attention", 0)])
def test_a_reader_that_goes_away_changes_neither_the_exit_code_nor_standard_error(name, expected, file):
    command = [*PROGRAM, f"{file}:{name}", "--args", "14", "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == expected


def restore_interrupt():
    """Let a process be interrupted where the tests run in the background of a shell, which ignores the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_subject_with_the_command(number, expected, file):
    command = [*PROGRAM, f"{file}:Ending", "--args", "waits"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=restore_interrupt) as process:
        came = next(found for line in process.stdout if (found := WAITING.search(line.decode())))
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as Ctrl-C does
        else:
            process.terminate()
        assert process.stderr.read() == b""
    assert process.returncode == expected
    end = time.monotonic() + 60
    while is_running(int(came[1])):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_help_says_that_code_is_run_and_names_the_time_limit(capsys):
    with pytest.raises(SystemExit):
        main(["examine", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "It runs the code of the file or package" in shown
    assert "--time-limit SECONDS" in shown


@pytest.mark.slow
def test_the_command_runs_as_a_program_of_its_own(file):
    done = subprocess.run([*PROGRAM, f"{file}:Leaking", "--args", "14", "6"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "future leak" in done.stdout
    assert done.stderr == ""
