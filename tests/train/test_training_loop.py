import copy
import math

import pytest
import torch
from torch import nn

from bounds import assert_within, sum_bound
from default_dtype import use_default_dtype
from regard import DataError
from regard.evaluate import perplexity
from regard.text.corpus import Corpus, Reader
from regard.train import begin, loop, optimizer, run
from regard.train.loss import compute_loss, count_targets
from regard.train.seeds import seed_generators
from regard.train.training_loop import compute_held_out_loss
from train import small_runs


def begin_run(folder, tmp_path, **settings):
    return begin(small_runs.config(folder, **{"out": str(tmp_path / "run"), "checkpoint_every": 0, **settings}))


def begin_in_float64(folder, tmp_path, **settings):
    with use_default_dtype(torch.float64):
        return begin_run(folder, tmp_path, **settings)


def weights(training) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in training.model.state_dict().items()}


def are_equal(one, other) -> bool:
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.slow
@pytest.mark.emulated
def test_a_tiny_text_is_learned_by_heart(tmp_path):
    text = "abcdefghijklmnop" * 2
    small_runs.corpus(tmp_path, text)
    settings = {"steps": 120, "batch": 2, "learning_rate": 0.01, "held_out": 0.0, "warmup": 5, "width": 24}
    *_, last = loop(begin(small_runs.config(tmp_path, checkpoint_every=0, **settings)))
    assert last.loss_nats < 0.02
    assert last.skipped is None


def test_a_step_is_what_one_would_write_by_hand(folder, tmp_path):
    training = begin_in_float64(folder, tmp_path, clip=0.05, dropout=0.3)
    scale = sum_bound(torch.float32, 1)  # by which a gradient is shortened: it is a float32
    model = copy.deepcopy(training.model)
    adam = optimizer.make_optimizer(model, training.config)
    for number, report in zip((1, 2, 3), loop(training), strict=False):
        batch = training.reader.read(number - 1)
        with seed_generators(training.config.seed, number, 0, torch.device("cpu")):
            loss = compute_loss(model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in adam.param_groups:
            group["lr"] = optimizer.compute_learning_rate(number, training.config)
        adam.step()
        adam.zero_grad()
        assert report.loss_nats == pytest.approx(float(loss.detach()), rel=scale)
        assert report.gradient_norm == pytest.approx(float(norm), rel=scale)
        assert report.gradient_norm > 0.05
        assert (report.step, report.batch, report.tokens) == (number, number - 1, 3 * 11)
        assert report.rate == optimizer.compute_learning_rate(number, training.config)
        for name, weight in model.state_dict().items():
            assert_within(training.model.state_dict()[name], weight, number * training.config.learning_rate * 2 * scale, name)


@pytest.mark.slow
def test_the_held_out_loss_is_the_mean_over_all_of_the_held_out_text(folder, tmp_path):
    training = begin_in_float64(folder, tmp_path, evaluate_batches=10**6, batch=1, dropout=0.3)
    _, kept = Corpus.load(folder / "corpus").split(0.1)
    reader, nats, targets = Reader(kept, batch=1, context=11), 0.0, 0
    training.model.eval()
    with torch.no_grad():
        for n in range(reader.windows):
            batch = reader.read(n)
            nats += float(compute_loss(training.model, batch)) * count_targets(batch)
            targets += count_targets(batch)
    training.model.train()
    assert compute_held_out_loss(training, training.held_out) == pytest.approx(nats / targets, rel=1e-9)
    assert training.model.training
    assert targets == kept.tokens - 1


@pytest.mark.parametrize("batch", [4, 5, 7, 300])
def test_the_held_out_loss_counts_each_window_once_whatever_the_batch(folder, tmp_path, batch):
    training = begin_in_float64(folder, tmp_path, evaluate_batches=10**6, batch=batch)
    _, kept = Corpus.load(folder / "corpus").split(0.1)
    expected = perplexity(training.model, kept, context=11, stride=11)
    assert training.held_out.windows % batch
    assert compute_held_out_loss(training, training.held_out) == pytest.approx(expected.loss_nats, rel=1e-9)


@pytest.mark.slow
def test_it_is_looked_at_when_it_is_due_and_at_the_end_and_the_best_is_marked(folder, tmp_path):
    training = begin_run(folder, tmp_path, steps=7, evaluate_every=3)
    reports = list(loop(training))
    looked = [report for report in reports if report.held_out_nats is not None]
    assert [report.step for report in looked] == [3, 6, 7]
    best = math.inf
    for report in looked:
        assert report.best == (report.held_out_nats < best)
        best = min(best, report.held_out_nats)
    assert training.best == best


@pytest.mark.slow
def test_a_batch_whose_loss_is_no_number_leaves_the_weights_as_they_are(folder, tmp_path):
    training = begin_run(folder, tmp_path)
    reports = loop(training)
    next(reports)
    kept = training.model.norm.bias.detach().clone()
    with torch.no_grad():
        training.model.norm.bias[0] = torch.nan
    before = weights(training)
    report = next(reports)
    assert (report.step, report.batch) == (2, 1)
    assert "the loss is nan" in report.skipped
    after = weights(training)
    assert all(torch.equal(x.nan_to_num(9), after[name].nan_to_num(9)) for name, x in before.items())
    with torch.no_grad():
        training.model.norm.bias.copy_(kept)
    assert next(reports).skipped is None
    assert training.running.skipped == 0
    assert not are_equal(before, weights(training))


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run_and_say_which(folder, tmp_path):
    training = begin_run(folder, tmp_path, patience=3, checkpoint_every=1, steps=9)
    reports = loop(training)
    next(reports)
    next(reports)
    with torch.no_grad():
        training.model.norm.bias[0] = torch.inf
    with pytest.raises(DataError, match=r"3 steps in a row were skipped, the last of them step 5, batch 4, where the loss is"):
        list(reports)


@pytest.mark.slow
def test_whoever_stops_it_finds_a_checkpoint(folder, tmp_path):
    heard = []

    def listener(training, report):
        heard.append(report.step)
        if report.step == 3:
            training.stop("enough")

    training = run(small_runs.config(folder, out=str(tmp_path / "run"), checkpoint_every=0, evaluate_every=0), [listener])
    assert (training.step, heard) == (3, [1, 2, 3])
    assert training.checkpoints.read_latest().step == 3


@pytest.mark.slow
def test_the_random_numbers_of_the_program_are_left_alone(folder, tmp_path):
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    list(loop(begin_run(folder, tmp_path, dropout=0.5, sample_every=2)))
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.slow
def test_the_seed_decides_everything_and_other_random_numbers_nothing(folder, tmp_path):
    found = []
    for n, seed in enumerate((5, 5, 6)):
        torch.manual_seed(n)
        training = begin_run(folder, tmp_path / str(n), dropout=0.3, seed=seed)
        found.append(([report.loss_nats for report in loop(training)], weights(training)))
    assert found[0][0] == found[1][0] != found[2][0]
    assert are_equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_a_sample_is_what_the_model_writes_after_the_prompt(folder, tmp_path):
    training = begin_run(folder, tmp_path, sample_every=2, prompt="the ", sample_tokens=5, steps=4)
    samples = [report.sample for report in loop(training)]
    assert [sample is None for sample in samples] == [True, False, True, False]
    assert all(sample.startswith("the ") and len(sample) == 9 for sample in samples if sample)
