"""Two processes that exchange by gloo over the loopback, and one that has all the rows: they learn the same."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bounds import sum_bound
from default_dtype import use_default_dtype
from ranks import describe_rank, find_free_ports
from regard import ConfigError
from regard.models import GPT2, translator
from regard.text.pairs import PairReader, Pairs
from regard.train import begin, follow, run
from regard.train.checkpoints import CheckpointManager
from regard.train.distributed import read_ranks, start_engine
from regard.train.listeners.json_lines import LOG_NAME, ReportLog, read_rows
from train import small_runs
from train.distributed_runs import start_processes, train_in_processes

# Runs are compared in float64: in float32 Adam makes whole updates of gradients that are rounding alone. A float32 is left,
# the scale by which the optimiser shortens a gradient; other processes may round it to the other side.
SCALE = sum_bound(torch.float32, 1)
NEAR = 10 * 0.01 * 2 * SCALE  # of weights: an update of Adam is off by twice the scale, of ten steps at a rate of 0.01
SAME = 2e-6  # of losses, relative: √n |g| NEAR, of 12,312 weights at most, a gradient |g| of 2.6 and a loss of 5: 1.4e-6
TEN = {"steps": 10, "batch": 6, "accumulate": 3, "learning_rate": 0.01, "checkpoint_every": 0, "evaluate_every": 5}
RUNS = {  # each by ddp, by fsdp and alone
    "tied": {},
    "untied": {"tied": False},
    "documents": {"mask_documents": True, "accumulate": 1},
    "recomputed": {"activation_checkpointing": True},
    "half": {"precision": "bfloat16"},
    "single": {},
}
FLOAT32 = ("half", "single")  # of these; the others compute in float64


def config(folder, name, **settings):
    """The run of a name, or of the first word of a name."""
    settings = {**TEN, **RUNS.get(name.split()[0], {}), "out": str(folder / name), **settings}
    tied = settings.pop("tied", True)
    one = small_runs.config(folder, **settings)
    return replace(one, model=replace(one.model, tied=tied))


def translation(folder, name, **settings):
    """The run of a translator whose name is the first word of a name."""
    settings = {"steps": 10, "accumulate": 3, "learning_rate": 0.01, "checkpoint_every": 0, "evaluate_every": 5, **settings}
    settings = {"batch_tokens": 40, "sample_every": 5, "out": str(folder / name), **settings}  # some batches are of one pair
    return small_runs.translation(folder, name.split()[0], **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every run: by two processes with either engine, and alone."""
    path = tmp_path_factory.mktemp("together")
    small_runs.corpus(path, ["the cat sat on the mat. " * 9, "the dog saw the cat again. " * 11, "and again and again! " * 35])
    runs, wide = [], {"float64": True}
    for name in RUNS:
        learn(config(path, name), name not in FLOAT32)
        asked = {"float64": name not in FLOAT32, "states": name == "tied"}
        runs += [(config(path, f"{name} {engine}", engine=engine), asked) for engine in ("ddp", "fsdp")]
    small_runs.pairs(path)
    for name in small_runs.TRANSLATORS:
        learn(translation(path, name))
        runs += [(translation(path, f"{name} {engine}", engine=engine), wide) for engine in ("ddp", "fsdp")]
    stopped_alone = [config(path, f"one then {engine}", engine=engine) for engine in ("ddp", "fsdp")]
    for one in stopped_alone:
        halfway(one)
    runs += [(one, wide) for one in stopped_alone]
    runs += [(config(path, f"{engine} then one", engine=engine), {"last": 4, **wide}) for engine in ("ddp", "fsdp")]
    both = [config(path, "ddp then fsdp", engine=engine) for engine in ("ddp", "fsdp")]
    (path / "story.txt").write_text(small_runs.TEXT)
    runs.append((replace(config(path, "text"), corpus="", text=str(path / "story.txt")), {}))
    train_in_processes(path, [*runs, (both[0], {"last": 4, **wide}), (both[1], wide)])
    return path


def halfway(one) -> None:
    """A run that is told to stop after its fourth step."""
    listeners = [ReportLog(Path(one.out) / LOG_NAME), lambda training, report: report.step == 4 and training.stop("the test")]
    follow(begin_in_float64(one), listeners)


def begin_in_float64(one):
    with use_default_dtype(torch.float64):
        return begin(one)


def learn(one, wide: bool = True) -> None:
    """A run alone, from its beginning to its end."""
    follow(begin_in_float64(one) if wide else begin(one), [ReportLog(Path(one.out) / LOG_NAME)])


def losses(folder, name, field="loss_nats") -> torch.Tensor:
    return torch.tensor([row[field] for row in read_rows(folder / name / LOG_NAME) if field in row], dtype=torch.float64)


def weights(folder, name) -> dict[str, torch.Tensor]:
    last = folder / name / "last"
    load = translator.load if name.split()[0] in small_runs.TRANSLATORS else GPT2.load
    return load(last if last.is_dir() else folder / name / "model", torch.float64).state_dict()


def without_idle(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformer's weights without its keys' biases, which raise a query's scores all alike: rounding moves them."""
    width = {"W_query_key_value.bias": slice(12, 24), "W_key_value.bias": slice(0, 12)}
    for name, x in weights.items():
        for end, keys in width.items():
            if name.endswith(f".{end}"):
                x[keys] = 0
    return weights


def find_largest_difference(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(float((x - other[name]).abs().max()) for name, x in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["tied", "untied", "documents", *small_runs.TRANSLATORS])
def test_two_processes_learn_what_one_learns(folder, name, engine):
    for field, count in (("loss_nats", 10), ("gradient_norm", 10), ("held_out_nats", 2)):
        one, two = losses(folder, name, field), losses(folder, f"{name} {engine}", field)
        assert len(one) == count
        torch.testing.assert_close(two, one, rtol=SAME, atol=0)
    assert losses(folder, name)[0] - losses(folder, name)[-1] > 0.2  # it did learn
    assert find_largest_difference(*(without_idle(weights(folder, one)) for one in (name, f"{name} {engine}"))) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", small_runs.TRANSLATORS)
def test_processes_say_how_many_tokens_all_of_them_read_and_one_writes_samples(folder, name, engine):
    alone, together = (read_rows(folder / one / LOG_NAME) for one in (name, f"{name} {engine}"))
    assert [row["tokens"] for row in alone] == [row["tokens"] for row in together]
    assert any(PairReader(Pairs.load(folder / "pairs").train, 40).read(n).lengths.numel() == 1 for n in range(30))
    assert [("sample" in row) for row in alone] == [("sample" in row) for row in together]
    assert any("sample" in row for row in alone)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", " ddp", " fsdp"])
def test_computing_activations_again_changes_no_bit(folder, engine):
    assert torch.equal(losses(folder, f"recomputed{engine}"), losses(folder, f"tied{engine}"))
    assert find_largest_difference(weights(folder, f"recomputed{engine}"), weights(folder, f"tied{engine}")) == 0


@pytest.mark.slow
def test_bfloat16_in_two_processes_is_as_near_to_float32_as_in_one(folder):
    step = float(losses(folder, "single")[-1]) * 2**-8  # of bfloat16; float32's is 65,536 times smaller
    for name in ("half", "half ddp", "half fsdp"):
        away = float((losses(folder, name) - losses(folder, "single")).abs().max())
        assert step / 256 < away < step, name  # it is rounded to bfloat16, and the loss is no further off than one rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one then ddp", "one then fsdp", "ddp then one", "fsdp then one", "ddp then fsdp"])
def test_a_run_goes_on_in_another_number_of_processes(folder, name):
    if name.endswith("one"):
        one = config(folder, name)
        assert CheckpointManager(folder / name / "checkpoints", 2).read_latest().step == 4
        training = begin_in_float64(one)
        assert training.resumed == 4
        follow(training, [ReportLog(folder / name / LOG_NAME)])
    assert [row["step"] for row in read_rows(folder / name / LOG_NAME)] == [*range(1, 11)]
    torch.testing.assert_close(losses(folder, name), losses(folder, "tied"), rtol=SAME, atol=0)
    assert find_largest_difference(weights(folder, name), weights(folder, "tied")) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "fault"), [("ddp", "error"), ("ddp", "SIGKILL"), ("fsdp", "SIGKILL"), ("fsdp", "SIGSTOP")])
def test_what_befalls_one_process_ends_the_other_with_a_sentence(folder, tmp_path, engine, fault):
    one = config(folder, "tied", out=str(tmp_path / "run"), engine=engine, steps=100_000)
    first, second = start_processes(tmp_path, [(one, {"timeout": 5, "fault": fault})])
    try:
        code, err = first.wait(100)
        if fault == "SIGSTOP":
            second.kill()
        _, other = second.wait(60)
    finally:
        first.kill()  # nothing if it has ended, as it should have
        second.kill()
    if fault == "error":  # the second has said it
        assert (code, err, other) == (2, "", "the story is damaged.\n")
        return
    assert (code, other) == (1, "")
    assert err.startswith("process 0 of 2 lost the others: one of them ended, or did not respond for 5 seconds.")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile writes C++, and there is no g++")
def test_compiled_blocks_learn_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    small_runs.corpus(tmp_path)
    settings = {"steps": 4, "batch": 6, "layers": 2, "evaluate_every": 0}
    one = small_runs.config(tmp_path, out=str(tmp_path / "one"), **settings)
    learn(one)
    names, settings = ("ddp", "fsdp"), {"compile": True, "activation_checkpointing": True}
    runs = [replace(one, out=str(tmp_path / name), engine=name, **settings) for name in names]
    asked = {"timeout": 300, "float64": True}
    train_in_processes(tmp_path, [(each, asked) for each in runs], warn="default")  # inductor itself warns
    for name in names:
        torch.testing.assert_close(losses(tmp_path, name), losses(tmp_path, "one"), rtol=SAME, atol=0)


def torchrun(tmp_path, *arguments) -> subprocess.Popen:
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "regard", "train", "--text", "story.txt", "--layers", "1", "--heads", "2", "--width", "12"]
    command += ["--context", "11", "--warmup", "2", "--peak-tflops", "1", *arguments]
    (tmp_path / "story.txt").write_text(small_runs.TEXT)
    known = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "error"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=known, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_torchrun_trains_from_the_command_line_and_one_process_speaks(tmp_path, engine):
    settings = ["--steps", "7", "--batch", "4", "--engine", engine, "--sample-every", "7", "--observe", "every=7"]
    process = torchrun(tmp_path, *settings)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    for line in ("steps = 7", f"2 processes, {engine}", f"picture: {Path('run/curves.png')}"):
        assert out.splitlines().count(line) == 1
    assert [row["step"] for row in read_rows(tmp_path / "run" / LOG_NAME)] == [*range(1, 8)]
    assert "sample" in read_rows(tmp_path / "run" / LOG_NAME)[-1]
    assert {row["step"] for row in read_rows(tmp_path / "run" / "heads.jsonl")} == {1, 7}
    assert GPT2.load(tmp_path / "run" / "model").text is not None


@pytest.mark.slow
def test_a_signal_to_torchrun_ends_all_with_a_checkpoint(tmp_path):
    process = torchrun(tmp_path, "--batch", "4", "--steps", "1000000", "--evaluate-every", "0", "--checkpoint-every", "0")
    for line in process.stdout:
        if line.split()[:1] == ["1"]:  # the first step is done
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    last = CheckpointManager(tmp_path / "run" / "checkpoints", 2).read_latest()
    assert f"SIGTERM: stopped after step {last.step:,}, which is saved" in out
    assert len(read_rows(tmp_path / "run" / LOG_NAME)) == last.step


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"MASTER_PORT": None}, "but not MASTER_PORT: torchrun sets"), ({"RANK": "first"}, "are numbers, .*RANK='first'")],
)
def test_an_environment_that_is_not_torchruns_is_refused(monkeypatch, changed, says):
    for name, value in {**describe_rank(1, 29500), **changed}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says):
        read_ranks()


@pytest.mark.slow
def test_a_process_that_meets_no_other_says_where_it_looked(monkeypatch, tmp_path):
    (port,) = find_free_ports(1)
    for name, value in describe_rank(1, port).items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=rf"process 1 of 2 could not join the others at 127\.0\.0\.1:{port}: "),
        start_engine(config(tmp_path, "tied"), 1),
    ):
        pass


@pytest.mark.slow
def test_what_is_computed_again_draws_the_same_dice(tmp_path):
    small_runs.corpus(tmp_path)
    settings = {"steps": 3, "dropout": 0.3, "evaluate_every": 0}
    found = [
        run(small_runs.config(tmp_path, out=str(tmp_path / str(again)), activation_checkpointing=again, **settings)).model
        for again in (False, True)
    ]
    assert find_largest_difference(found[0].state_dict(), found[1].state_dict()) == 0
