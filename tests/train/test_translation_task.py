import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bounds import assert_within, sum_bound
from default_dtype import use_default_dtype
from regard import ConfigError
from regard.generate.translation_search import translate
from regard.models import translator
from regard.text.pairs import PairReader, Pairs
from regard.train import begin, loop, optimizer, run
from regard.train.listeners.json_lines import ReportLog
from regard.train.seeds import seed_generators
from regard.train.training_loop import accumulate_gradients, compute_held_out_loss
from text.pairs.small_pairs import make_pairs, write_pairs
from train import small_runs
from train.small_runs import read_bits, read_log

NAMES = list(small_runs.TRANSLATORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    small_runs.pairs(path)
    return path


def begin_translation(folder, tmp_path, name, **settings):
    return begin(small_runs.translation(folder, name, **{"out": str(tmp_path / "run"), **settings}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_few_sentences_are_learned_by_heart(tmp_path, name):
    write_pairs(tmp_path, "some", make_pairs(6))
    settings = {"corpus": "", "pairs": [str(tmp_path / "some")], "vocabulary": "270", "steps": 250, "evaluate_every": 0}
    settings |= {"learning_rate": 0.01, "label_smoothing": 0.0, "weight_decay": 0.0, "checkpoint_every": 0}
    training = run(
        small_runs.translation(
            tmp_path,
            name,
            out=str(tmp_path / "run"),
            **settings,
            model={"width": 32, "hidden": 32} if name != "transformer" else {"width": 32},
        )
    )
    model = translator.load(tmp_path / "run" / "model")
    assert model.text.vocabulary == training.config.model.vocabulary == 270
    part = training.reader.part
    found = translate(model, [[*part.get_sentence("source", n), part.text.end] for n in range(len(part))])
    assert [model.text.decode(one.tokens[:-1]) for one in found] == part.decode_sentences("target")
    assert len(part) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_what_one_would_write_by_hand(folder, tmp_path, name):
    with use_default_dtype(torch.float64):
        training = begin_translation(folder, tmp_path, name, clip=0.05, model={"dropout": 0.3})
    scale = sum_bound(torch.float32, 1)  # by which a gradient is shortened: it is a float32
    model = copy.deepcopy(training.model)
    adam = optimizer.make_optimizer(model, training.config)
    for number, report in zip((1, 2, 3), loop(training), strict=False):
        batch = training.reader.read(number - 1)
        with seed_generators(training.config.seed, number, 0, torch.device("cpu")):
            logits = model(batch.sources, batch.lengths, batch.before)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in adam.param_groups:
            group["lr"] = optimizer.compute_learning_rate(number, training.config)
        adam.step()
        adam.zero_grad()
        assert report.loss_nats == pytest.approx(float(loss.detach()), rel=scale)
        assert report.gradient_norm == pytest.approx(float(norm), rel=scale)
        assert (report.step, report.batch, report.tokens) == (number, number - 1, batch.tokens)
        for one, weight in model.state_dict().items():
            assert_within(training.model.state_dict()[one], weight, number * training.config.learning_rate * 2 * scale, one)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_one_step_weigh_by_their_targets(folder, tmp_path, name):
    training = begin_translation(folder, tmp_path, name, accumulate=3, label_smoothing=0.0)
    training.model.double()
    batches = [training.reader.read(n) for n in range(3)]
    assert len({int((batch.targets != -100).sum()) for batch in batches}) > 1
    loss = accumulate_gradients(training, 1, batches)
    nats = targets = 0.0
    for batch in batches:
        logits = training.model(batch.sources, batch.lengths, batch.before)
        nats += float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").detach())
        targets += int((batch.targets != -100).sum())
    assert loss == pytest.approx(nats / targets, rel=1e-9)


def test_the_held_out_loss_is_the_mean_over_all_of_the_valid_part_without_smoothing(folder, tmp_path):
    with use_default_dtype(torch.float64):
        training = begin_translation(folder, tmp_path, "plain", evaluate_batches=10**6, model={"dropout": 0.3})
    valid = Pairs.load(folder / "pairs").valid
    reader, nats, targets = PairReader(valid, 10**6), 0.0, 0
    assert reader.batches == 1
    batch = reader.read(0)
    training.model.eval()
    with torch.no_grad():
        logits = training.model(batch.sources, batch.lengths, batch.before)
        nats = float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"))
    training.model.train()
    targets = int(valid.lengths[:, 1].sum()) + len(valid)
    assert compute_held_out_loss(training, training.held_out) == pytest.approx(nats / targets, rel=1e-9)
    assert training.model.training


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped_and_goes_on_is_the_one_that_never_was(folder, tmp_path, name):
    def settings(out):
        more = {"accumulate": 2, "steps": 11, "sample_every": 4, "model": {"dropout": 0.3}}
        return small_runs.translation(folder, name, out=str(tmp_path / out), **more)

    whole = run(settings("whole"), [ReportLog(tmp_path / "whole" / "log.jsonl")])
    for place in (3, 6):

        def stop(training, report, place=place):
            if report.step == place:
                training.stop("a test")

        run(settings("parts"), [ReportLog(tmp_path / "parts" / "log.jsonl"), stop])
    again = run(settings("parts"), [ReportLog(tmp_path / "parts" / "log.jsonl")])
    assert again.resumed == 6
    assert read_bits(again) == read_bits(whole)
    assert read_log(tmp_path / "parts") == read_log(tmp_path / "whole")
    assert any("\n" in row.get("sample", "") for row in read_log(tmp_path / "whole"))
    for kept in ("model", "last"):
        files = [tmp_path / out / kept / "model.safetensors" for out in ("parts", "whole")]
        assert not files[1].is_file() or files[0].read_bytes() == files[1].read_bytes()


def test_a_sample_is_the_translation_of_the_prompt_or_of_a_held_out_sentence(folder, tmp_path):
    for prompt in ("one two", ""):
        training = begin_translation(
            folder, tmp_path / prompt, "plain", prompt=prompt, sample_every=1, steps=1, sample_tokens=5
        )
        (report,) = loop(training)
        source, found = report.sample.split("\n", 1)
        assert source == prompt or source in Pairs.load(folder / "pairs").valid.decode_sentences("source")
        training.model.eval()
        (expected,) = translate(training.model, [[*training.task.text.encode(source), training.task.text.end]], longest=5)
        tokens = [one for one in expected.tokens if one != training.task.text.end]
        assert found == training.task.text.decode(tokens)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"corpus": ""}, "a translator needs either corpus"),
        ({"corpus": "", "pairs": "some", "vocabulary": "letters"}, "vocabulary must be gpt2, or the number of pieces"),
        ({"model": {"vocabulary": 5}}, "model.vocabulary is 5, but the pairs have 290. Leave it out."),
        ({"model": {"context": 7}}, r"sentence has \d+ tokens with its end, but model.context is 7"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(folder, tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says):
        begin_translation(folder, tmp_path, "transformer", **settings)
