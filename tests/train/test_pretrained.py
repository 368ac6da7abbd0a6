from dataclasses import replace

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, cross_entropy_bounds, estimate_rounding
from regard import ConfigError
from regard.models import GPT2
from regard.train import TrainConfig, begin, run
from regard.train.loss import compute_loss
from train import small_runs


@pytest.fixture
def model_folder(tmp_path):
    """A model of a run of its own, whose weights have gone some way."""
    small_runs.corpus(tmp_path)
    run(small_runs.config(tmp_path, out=str(tmp_path / "first"), learning_rate=0.01))
    return tmp_path / "first" / "model"


def again(folder, start, **settings):
    """A run on the text itself, which starts from a model and says nothing of sizes."""
    text = folder / "text.txt"
    text.write_text(small_runs.TEXT)
    first = {
        "text": str(text),
        "start": str(start),
        "out": str(folder / "second"),
        "steps": 5,
        "batch": 3,
        "checkpoint_every": 2,
    }
    return TrainConfig(**{**first, **settings})


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


@pytest.mark.slow
def test_a_run_starts_from_the_weights_the_sizes_and_the_vocabulary_of_a_model(tmp_path, model_folder):
    training = begin(again(tmp_path, model_folder))
    former = GPT2.load(model_folder)
    assert training.config.model == former.config
    assert training.task.text.alphabet == former.text.alphabet
    torch.testing.assert_close(weights(training.model), weights(former), rtol=0, atol=0)


@pytest.mark.slow
def test_the_loss_of_its_first_step_is_that_of_the_model(tmp_path, model_folder):
    config = again(tmp_path, model_folder)
    batch = begin(config).reader.read(0)
    exact = GPT2.load(model_folder, torch.float64)

    @torch.no_grad()
    def loss(model):
        return compute_loss(model, batch, count=batch.targets.numel())

    losses = []
    run(config, [lambda training, report: losses.append(report.loss_nats)])
    rounding = estimate_rounding(exact, loss, exact.config.inner + EXPONENTIAL)
    logits, targets = exact(batch.tokens).flatten(0, 1), batch.targets.flatten()
    own, _ = cross_entropy_bounds(torch.float32, logits, targets, terms=len(targets) + 1)
    assert_within(losses[0], loss(exact), rounding + own / len(targets))
    assert losses[-1] != losses[0]


@pytest.mark.slow
def test_dropout_is_the_runs_own(tmp_path, model_folder):
    former = GPT2.load(model_folder).config
    training = begin(again(tmp_path, model_folder, model=replace(TrainConfig().gpt2, dropout=0.3)))
    assert training.config.model == replace(former, dropout=0.3)
    assert {one.p for one in training.model.modules() if isinstance(one, torch.nn.Dropout)} == {0.3}


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_from_its_own_weights(tmp_path, model_folder):
    through = begin_and_end(again(tmp_path, model_folder, out=str(tmp_path / "through"), schedule="constant then decay"))
    halted = again(tmp_path, model_folder, out=str(tmp_path / "halted"), schedule="constant then decay")

    def stop(training, report):
        if training.step == 3:
            training.stop("enough")

    run(halted, [stop])
    torch.testing.assert_close(weights(begin_and_end(halted).model), weights(through.model), rtol=0, atol=0)


def begin_and_end(config):
    run(config)
    return begin(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": replace(TrainConfig().gpt2, layers=3)}, r"has its own\. Leave them out; only dropout may be set"),
        ({"vocabulary": "gpt2"}, r"vocabulary is 'gpt2', but .* has one of its own"),
        ({"vocabulary": "300"}, r"vocabulary is '300', but .* has one of its own"),
    ],
)
def test_what_the_model_says_itself_is_not_said_otherwise(tmp_path, model_folder, settings, says):
    with pytest.raises(ConfigError, match=says):
        begin(again(tmp_path, model_folder, **settings))
    assert not (tmp_path / "second").exists()


@pytest.mark.slow
def test_a_corpus_of_other_tokens_is_refused(tmp_path, model_folder):
    (tmp_path / "other").mkdir()
    corpus = small_runs.corpus(tmp_path / "other", small_runs.TEXT.replace("cat", "owl"))
    with pytest.raises(ConfigError, match=r"the corpus was prepared with Letters.*give the text itself"):
        begin(again(tmp_path, model_folder, text="", corpus=corpus))


@pytest.mark.slow
def test_the_pocket_model_is_a_start_by_its_name(tmp_path):
    training = begin(again(tmp_path, "pocket", batch=1))
    torch.testing.assert_close(weights(training.model), weights(GPT2.load("pocket")), rtol=0, atol=0)
    assert training.task.text.vocabulary == 2048
