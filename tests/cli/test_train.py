import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest

from regard.cli import main
from regard.cli.train import SIZES
from regard.models import GPT2, GPT2Config
from regard.train import TrainConfig
from regard.train.checkpoints import CheckpointManager
from regard.train.listeners.json_lines import read_rows

STORY = "the cat sat on the mat, and the dog saw the cat again and again. " * 30
SMALL = ["--layers", "1", "--heads", "2", "--width", "12", "--context", "11", "--batch", "3", "--warmup", "2"]
SMALL += ["--evaluate-every", "5", "--peak-tflops", "1"]


@pytest.fixture(autouse=True)
def a_quiet_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "story.txt").write_text(STORY)


def run_train(capsys, *arguments):
    code = main(["train", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_a_text_file_becomes_a_model_in_one_command(capsys, tmp_path):
    code, out, err = run_train(capsys, "--text", "story.txt", "--steps", "11", *SMALL, "--observe", "every=5")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    config = TrainConfig.from_table({}, text="story.txt", steps=11)
    assert f"steps = {config.steps}\n" in out
    assert "model: run/model, the best: " in out
    assert [row["step"] for row in read_rows(tmp_path / "run" / "log.jsonl")] == list(range(1, 12))
    assert sorted({row["step"] for row in read_rows(tmp_path / "run" / "heads.jsonl")}) == [1, 5, 10, 11]
    assert all((tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG") for name in ("curves.png", "heads.png"))
    assert "".join(GPT2.load("run/model").complete("the", 5, seed=0)) != ""


@pytest.mark.slow
def test_the_same_command_goes_on_and_a_changed_one_is_refused(capsys):
    command = ["--text", "story.txt", *SMALL]
    run_train(capsys, *command, "--steps", "3")
    code, out, _ = run_train(capsys, *command, "--steps", "5")
    assert code == 0
    assert "resuming after step 3\n" in out
    code, out, _ = run_train(capsys, *command, "--steps", "5")
    assert code == 0
    assert "all 5 steps are done; a larger --steps continues\n" in out
    code, _, err = run_train(capsys, *command, "--steps", "5", "--learning-rate", "0.5")
    assert code == 2
    assert err == (
        "regard train: learning_rate is 0.5, but the run in run has 0.001; a change would alter its results. "
        "Use 0.001 to resume it, or name another folder as out.\n"
    )


@pytest.mark.slow
def test_a_run_whose_checkpoints_were_removed_is_not_started_again(capsys, tmp_path):
    command = ("--text", "story.txt", *SMALL, "--steps", "12", "--evaluate-every", "4")
    run_train(capsys, *command)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "aside")
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    code, out, err = run_train(capsys, *command)
    assert (code, out) == (2, "")
    assert "has a run of 12 steps" in err
    assert "but no checkpoint in run/checkpoints" in err
    assert "--out" in err
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
    (tmp_path / "aside").rename(tmp_path / "run" / "checkpoints")
    assert run_train(capsys, *command)[0] == 0
    shutil.rmtree(tmp_path / "run")
    assert run_train(capsys, *command)[0] == 0


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(capsys, tmp_path):
    command = ("--text", "story.txt", *SMALL, "--steps", "12", "--evaluate-every", "4")
    run_train(capsys, *command)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    log = tmp_path / "run" / "log.jsonl"
    first = next(n for n, line in enumerate(log.read_text().splitlines()) if '"best": true' in line)
    log.write_text("\n".join(log.read_text().splitlines()[: first + 1]) + "\n")
    assert run_train(capsys, *command)[0] == 0


def test_there_is_a_flag_for_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = capsys.readouterr().out
    names = [one.name for one in fields(TrainConfig) if one.name not in ("model", "observe_every")]
    names += [one.name for one in fields(GPT2Config) if one.name != "vocabulary"]
    assert [name for name in names if not re.search(rf"--(\[no-\])?{name.replace('_', '-')}\s", told)] == []
    assert {*SIZES} == {one.name for one in fields(GPT2Config)} - {"vocabulary"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a run needs either corpus"),
        (["--corpus", "story.txt"], "If it is a text, give it as text."),
        (["--text", "none.txt"], "none.txt is neither a file"),
        (["--text", "story.txt", "--observe", "often"], "--observe must be every=N"),
        (["--text", "story.txt", "--steps", "0"], "steps must be a whole number of at least 1"),
        (["--config", "none.toml"], "there is no none.toml"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2(capsys, arguments, says):
    code, _, err = run_train(capsys, *arguments)
    assert code == 2
    assert err.startswith("regard train: ")
    assert says in err
    assert err.count("\n") == 1


def start_training(tmp_path, *arguments, **settings):
    command = [sys.executable, "-W", "error", "-m", "regard", "train", "--text", "story.txt", *SMALL, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=environment, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_a_checkpoint_a_sentence_and_its_code(tmp_path, number, code):
    process = start_training(tmp_path, "--steps", "1000000", "--checkpoint-every", "0", "--evaluate-every", "0")
    for line in process.stdout:
        if line.split()[:1] == ["1"]:  # the first step is done, and told through the pipe
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (code, "")
    last = CheckpointManager(tmp_path / "run" / "checkpoints", 2).read_latest()
    assert f"{number.name}: stopped after step {last.step:,}, which is saved; the same command resumes there" in out
    assert len(read_rows(tmp_path / "run" / "log.jsonl")) == last.step


@pytest.mark.slow
def test_a_full_disk_ends_it_with_a_sentence_and_leaves_the_last_checkpoint_whole(tmp_path):
    done = start_training(tmp_path, "--steps", "4", "--checkpoint-every", "2", "--width", "64")
    assert done.wait(60) == 0
    done.communicate()
    last = tmp_path / "run" / "checkpoints" / "step-00000004"
    most = sum(path.stat().st_size for path in last.glob("*.distcp")) // 2

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # of each file

    process = start_training(tmp_path, "--steps", "8", "--checkpoint-every", "2", "--width", "64", preexec_fn=little_room)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, out
    assert "could not be written" in err
    assert err.count("\n") == 1
    assert CheckpointManager(tmp_path / "run" / "checkpoints", 2).read_latest().step == 4
    assert not list((tmp_path / "run").rglob(".*partial"))
    again = start_training(tmp_path, "--steps", "8", "--checkpoint-every", "2", "--width", "64")
    out, err = again.communicate(timeout=300)
    assert (again.returncode, err) == (0, "")
    assert "resuming after step 4" in out


@pytest.mark.slow
def test_what_is_written_goes_through_a_pipe_line_by_line(tmp_path):
    process = start_training(tmp_path, "--steps", "1000000", "--evaluate-every", "0")
    begun = time.monotonic()
    for line in process.stdout:
        if line.split()[:1] == ["1"]:
            break
    assert time.monotonic() - begun < 60
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert json.loads((tmp_path / "run" / "log.jsonl").read_text().split("\n")[0])["step"] == 1
