"""What the estimate says, held against what processes have in memory and exchange."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.models import GPT2, GPT2Config
from regard.text.corpus import TokenBatch
from regard.train import TrainConfig, cost_estimate
from regard.train.cost_estimate import NUMBER_SIZES, estimate_cost
from regard.train.language_task import wrap_blocks
from regard.train.loss import compute_loss
from train import small_runs
from train.distributed_runs import train_in_processes
from train.test_distributed import config

SHAPE = GPT2Config(layers=3, heads=5, width=35, context=23, vocabulary=29)
ONE = TrainConfig(model=SHAPE, batch=7)


def autograd_keeps(model: GPT2, rows: int, half: bool) -> dict[str, int]:
    """The bytes of the tensors that a step's backward waits for, but for the weights themselves: the weights' copies, the rest.

    Tensors of the loss alone, as large as the logits, are left out.
    """
    tokens = torch.zeros(rows, model.config.context, dtype=torch.int64)
    weights = {x.data_ptr() for x in model.parameters()}
    shapes = {x.shape for x in model.parameters() if x.dim() == 2} | {x.mT.shape for x in model.parameters() if x.dim() == 2}
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x  # while it is kept, nothing else can lie there
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = compute_loss(model, TokenBatch(tokens, tokens, tokens))
    assert loss.requires_grad
    found = {"copies": 0, "rest": 0}
    for place, x in kept.items():
        if place not in weights and x.shape[-1:] != (model.config.vocabulary,):
            found["copies" if x.shape in shapes else "rest"] += x.untyped_storage().nbytes()
        elif place not in weights and x.shape in shapes:
            found["copies"] += x.untyped_storage().nbytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("engine", "precision"), NUMBER_SIZES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
def test_activations_are_those_that_autograd_keeps(engine, precision, again, activation):
    shape = replace(SHAPE, activation=activation)
    one, half = estimate_cost(replace(ONE, model=shape, precision=precision), 1, engine), precision == "bfloat16"
    torch.manual_seed(0)
    model = wrap_blocks(GPT2(shape), activation_checkpointing=again, compiled=False)
    if engine == "fsdp" and half:
        model, half = model.bfloat16(), False
    measured = autograd_keeps(model, 7, half)
    said = one.recomputed - block_at_a_time(shape, engine, precision) if again else one.activations
    assert measured["rest"] == pytest.approx(said, rel=0.03)
    if half and not again:
        assert measured["copies"] == one.gathered


def block_at_a_time(shape: GPT2Config, engine: str, precision: str) -> int:
    """What a block that is computed again takes, beyond its input: it is there in the backward alone."""
    tokens, rounding = 7 * shape.context, NUMBER_SIZES[engine, precision]
    two, one = (cost_estimate.count_activation_bytes(shape, tokens, rounding, blocks) for blocks in (2, 1))
    return two - one - tokens * shape.width * rounding.stream


@pytest.mark.parametrize("half", [False, True])
def test_logits_are_what_the_loss_keeps_and_its_gradient(half):
    logits = torch.randn(11, 13, requires_grad=True)
    rounded = logits.bfloat16() if half else logits
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() if x.shape == (11, 13) else 0
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.nn.functional.cross_entropy(rounded.float(), torch.zeros(11, dtype=torch.int64))
    gradients = 4 + (2 if half else 0)
    assert cost_estimate.count_logit_bytes(replace(SHAPE, vocabulary=13), 11, half) == sum(kept.values()) + 11 * 13 * gradients


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned")
    small_runs.corpus(path)
    settings = {"steps": 2, "batch": 6, "evaluate_every": 0, "width": 10}
    named = [(f"{engine} {accumulate}", engine, accumulate) for engine in ("ddp", "fsdp") for accumulate in (1, 3)]
    runs = [config(path, name, engine=engine, accumulate=count, **settings) for name, engine, count in named]
    runs.append(config(path, "fsdp half", engine="fsdp", accumulate=3, precision="bfloat16", **settings))
    train_in_processes(path, [(one, {"states": True}) for one in runs])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp 1", "ddp 3", "fsdp 1", "fsdp 3", "fsdp half"])
def test_states_and_traffic_are_those_of_two_processes_to_the_byte(folder, name):
    said = json.loads((folder / name / "states.json").read_text())
    found = next((folder / name / "checkpoints").glob("step-*"))
    here = TrainConfig.from_table(json.loads((found / "run.json").read_text())["config"])
    one = estimate_cost(replace(here, batch=3, accumulate=2 * here.accumulate), 2, here.engine)
    assert (one.batch, one.accumulate) == (6, here.accumulate)
    assert (one.weights, one.moments) == (said["weights"], said["moments"])
    if here.engine == "ddp":
        assert one.gradients == said["gradients"]
        assert one.sent == said["bytes"]["allreduce_"] - 2 * 8  # of two processes each sends as much as it has
        return
    assert said["gradients"] == said["weights"] < one.gradients  # those not yet exchanged are gone
    assert one.sent == (said["bytes"]["_allgather_base_"] + said["bytes"]["_reduce_scatter_base_"]) // 2


def test_shards_shrink_and_what_is_done_stays_the_same():
    config = TrainConfig(model=GPT2Config.medium(), batch=4, accumulate=64)
    estimates = [estimate_cost(config, n, "fsdp") for n in (1, 8, 64)]
    assert [one.batch * one.accumulate for one in estimates] == [256, 256, 256]
    assert [round(estimates[0].weights / one.weights) for one in estimates] == [1, 8, 64]
    assert len({one.activations for one in estimates}) == 1
    assert [estimates[0].flops / one.flops for one in estimates] == [1, 8, 64]
    assert estimates[0].weights == 4 * 354_823_168
    assert estimates[0].sent == 0


@pytest.mark.parametrize("columns", [80, 40])
def test_the_command_prints_every_column_on_any_screen(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    flags = ["--accelerators", "1", "8", "64", "--batch", "8", "--accumulate", "64", "--peak-tflops", "400", "--link", "50"]
    assert main(["train", "--plan", "gpt2-xl", *flags]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for head in ("1", "8 ddp", "8 fsdp", "64 ddp", "64 fsdp"):
        assert head in out
    tables = 1 if columns == 80 else 3
    assert out.count("seconds: products") == out.count("  exchanges") == tables
    assert sum(len(line.split()) - 1 for line in out.splitlines() if line.startswith("accumulate")) == 5


def test_the_command_plans_the_config_that_it_would_train(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    small_runs.corpus(tmp_path)
    assert main(["train", "--plan", "--corpus", str(tmp_path / "corpus"), "--layers", "2"]) == 0
    shape = f"2 layers of 4 heads, width 128, context 64, vocabulary {len(set(small_runs.TEXT))}\n"
    assert shape in capsys.readouterr().out
    assert not Path("run").exists()
    assert main(["train", "--plan", "--vocabulary", "2000", "--dropout", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "2,000" in out
    assert "dropout is not counted" in out
    assert "seconds" not in out
