import json

import pytest
import torch

from regard import ConfigError, heads, probe_heads, record
from regard.train import begin, follow, run
from regard.train.listeners.head_observer import HeadObserver
from regard.train.listeners.json_lines import read_rows
from train import small_runs


def settings(folder, out, **more):
    return small_runs.config(folder, **{"out": str(out), "dropout": 0.3, "checkpoint_every": 0, **more})


@pytest.mark.slow
def test_a_run_that_is_observed_learns_the_same_bits(folder, tmp_path):
    found = []
    for name, listeners in (("plain", []), ("observed", [HeadObserver(tmp_path / "heads.jsonl", 1)])):
        reports = []
        training = run(settings(folder, tmp_path / name), [*listeners, lambda _, report, to=reports: to.append(report)])
        found.append((training.model.state_dict(), [report.loss_nats for report in reports]))
    (plain, losses), (observed, others) = found
    assert losses == others
    assert all(torch.equal(x, observed[name]) for name, x in plain.items())


@pytest.mark.slow
def test_the_mode_and_the_random_numbers_are_left_as_they_are(folder, tmp_path):
    training = begin(settings(folder, tmp_path))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(HeadObserver(tmp_path / "heads.jsonl", 1).observe_heads(training, 1))
    assert training.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(x.grad is None for x in training.model.parameters())


@pytest.mark.slow
def test_a_row_is_what_regard_heads_says_of_each_head(folder, tmp_path):
    training = begin(settings(folder, tmp_path))
    rows = list(HeadObserver(tmp_path / "heads.jsonl", 1, "the cat sat").observe_heads(training, 5))
    training.model.eval()
    tokens = torch.tensor([training.task.text.encode("the cat sat")])
    with record(training.model) as recording, torch.no_grad():
        training.model(tokens)
    text = training.task.text
    probed = probe_heads(training.model, vocabulary=text.vocabulary, begin=text.special.get("<|endoftext|>"), ablate="none")
    for on, expected in (("text", heads(recording, tokens=tokens)), ("repeated", probed)):
        mine = [row for row in rows if row["on"] == on]
        assert [(row["step"], row["layer"], row["head"], row["kind"]) for row in mine] == [
            (5, head.layer, head.head, head.kind) for head in expected
        ]
        for row, head in zip(mine, expected, strict=True):
            for name in ("previous token", "first token", "induction", "entropy"):
                assert row[name] == pytest.approx(head.scores[name], abs=0.5e-4 + 1e-9)  # half of the last of four digits
            score = head.scores["previous token"]
            assert (row["previous token low"], row["previous token high"]) == pytest.approx((score.low, score.high), abs=1e-4)
    copying = [row for row in rows if "copying" in row]
    assert [row["on"] for row in copying] == ["repeated"] * len(probed)
    assert all(row["copying low"] <= row["copying"] <= row["copying high"] for row in copying)


@pytest.mark.slow
def test_it_looks_at_the_first_the_last_and_every_so_many_steps(folder, tmp_path):
    training = begin(settings(folder, tmp_path, steps=8))
    follow(training, [HeadObserver(tmp_path / "heads.jsonl", 3)])
    rows = read_rows(tmp_path / "heads.jsonl")
    assert sorted({row["step"] for row in rows}) == [1, 3, 6, 8]
    assert len(rows) == 4 * 2 * 2 * 2
    assert all(json.dumps(row, allow_nan=False) for row in rows)


def test_what_cannot_be_observed_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="every 1 step or more"):
        HeadObserver(tmp_path / "heads.jsonl", 0)
    with pytest.raises(ConfigError, match="must have at least two tokens"):
        list(HeadObserver(tmp_path / "heads.jsonl", 1, "a").observe_heads(begin(settings(folder, tmp_path)), 1))
