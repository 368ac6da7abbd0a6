import json
import math
import shutil

import pytest
import torch

from regard import GPT2, ConfigError
from regard.train import Report, begin, loop, run
from regard.train.listeners.json_lines import ReportLog
from train import small_runs
from train.small_runs import read_bits, read_log


def settings(folder, out, **more):
    return small_runs.config(folder, **{"out": str(out), "dropout": 0.3, "accumulate": 2, "steps": 11, **more})


def make_stopper(step):
    def listener(training, report):
        if report.step == step:
            training.stop("a test")

    return listener


@pytest.fixture(scope="module")
def full_run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    training = run(settings(folder, out), [ReportLog(out / "log.jsonl")])
    return training, out


@pytest.mark.slow
@pytest.mark.parametrize("places", [(1,), (4,), (3, 5, 6), (10,)])
def test_a_run_that_was_stopped_and_goes_on_is_the_one_that_never_was(folder, full_run, tmp_path, places):
    for place in places:
        run(settings(folder, tmp_path), [ReportLog(tmp_path / "log.jsonl"), make_stopper(place)])
    again = run(settings(folder, tmp_path), [ReportLog(tmp_path / "log.jsonl")])
    assert again.resumed == places[-1]
    assert read_bits(again) == read_bits(full_run[0])
    assert (again.running, again.best) == (full_run[0].running, full_run[0].best)
    assert read_log(tmp_path) == read_log(full_run[1])
    for name in ("model", "last"):
        files = [out / name / "model.safetensors" for out in (tmp_path, full_run[1])]
        assert [file.is_file() for file in files] in ([True, True], [False, False])
        assert not files[0].is_file() or files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_one_that_is_left_in_the_middle_goes_on_from_its_last_checkpoint(folder, full_run, tmp_path):
    training = begin(settings(folder, tmp_path))
    log_of = ReportLog(tmp_path / "log.jsonl")
    for report in loop(training):
        log_of(training, report)
        if report.step == 8:
            break  # the checkpoint of step 8 would come after this
    again = run(settings(folder, tmp_path), [ReportLog(tmp_path / "log.jsonl")])
    assert again.resumed == 6
    assert read_bits(again) == read_bits(full_run[0])
    assert read_log(tmp_path) == read_log(full_run[1])


@pytest.mark.slow
def test_steps_may_be_raised_and_other_things_looked_at(folder, tmp_path):
    run(settings(folder, tmp_path, steps=3))
    again = run(settings(folder, tmp_path, steps=5, evaluate_every=1, sample_every=1))
    assert (again.resumed, again.step) == (3, 5)
    with pytest.raises(ConfigError, match=r"steps is 4, and the run in .* has done 5"):
        begin(settings(folder, tmp_path, steps=4))


def test_what_would_make_it_another_run_is_refused(folder, tmp_path):
    run(settings(folder, tmp_path, steps=3))
    with pytest.raises(ConfigError, match=r"learning_rate is 0\.5, but the run in .* has 0\.001"):
        begin(settings(folder, tmp_path, learning_rate=0.5))
    with pytest.raises(ConfigError, match=r"model\.width is 24, but the run in .* has 12"):
        begin(settings(folder, tmp_path, width=24))


@pytest.mark.slow
def test_another_corpus_is_refused_and_the_same_one_elsewhere_is_not(folder, tmp_path):
    run(settings(folder, tmp_path / "run", steps=3))
    shutil.copytree(folder / "corpus", tmp_path / "moved" / "corpus")
    assert run(settings(tmp_path / "moved", tmp_path / "run", steps=4)).resumed == 3
    small_runs.corpus(tmp_path, small_runs.TEXT.replace("dog", "cat"))
    with pytest.raises(ConfigError, match="the corpus is not the one"):
        begin(settings(tmp_path, tmp_path / "run", steps=5))


@pytest.mark.slow
def test_the_model_that_is_kept_is_the_best_and_reads_its_text(folder, full_run):
    training, out = full_run
    model = GPT2.load(out / "model")
    assert model.text.encode("the cat") == training.task.text.encode("the cat")
    best = min((row for row in read_log(out) if "held_out_nats" in row), key=lambda row: row["held_out_nats"])
    last = read_log(out)[-1]
    name = "model" if best == last else "last"
    assert torch.equal(GPT2.load(out / name).tokens.weight, training.model.tokens.weight)
    assert (out / "last").exists() == (best != last)


def test_a_checkpoint_says_what_it_is_of(full_run):
    says = json.loads(next((full_run[1] / "checkpoints").glob("step-00000011")).joinpath("run.json").read_text())
    assert says["config"] == full_run[0].config.to_table()
    assert says["computed_by"]["torch"] == torch.__version__
    assert (says["computed_by"]["processes"], says["computed_by"]["threads"]) == ("1", str(torch.get_num_threads()))
    assert says["step"] == 11


KNOWN = {"step": 3, "rate": 0.0, "gradient_norm": 1.5, "tokens": 33, "seconds": 0.25, "batch": 0}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_line_is_json_that_anyone_reads_whatever_the_loss(loss):
    row = Report(**KNOWN, loss_nats=loss, skipped=f"the loss is {loss}").to_row()
    assert json.loads(json.dumps(row, allow_nan=False)) == {**KNOWN, "skipped": f"the loss is {loss}"}
