import json
import pickle

import pytest
import torch
from torch import nn

from regard import DataError
from regard.train import TrainConfig, checkpoint_header, checkpoints, optimizer
from regard.train.checkpoints import CheckpointManager

SAYS = {"held_out_nats": None}


def make_model_and_optimizer(width=5, seed=0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 3))
    found = model, optimizer.make_optimizer(model, TrainConfig())
    checkpoints.initialize_moments(*found)
    return found


def step(model, made) -> None:
    model(torch.linspace(-1, 1, 14).view(2, 7)).square().sum().backward()
    made.step()
    made.zero_grad()


def save_steps(folder, steps=(1,), keep=9, width=5, **says):
    model, adam = make_model_and_optimizer(width)
    kept = CheckpointManager(folder, keep)
    for number in steps:
        step(model, adam)
        kept.save(model, adam, {**SAYS, **says, "step": number})
    kept.wait()
    return model, adam


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


def test_what_is_loaded_goes_on_as_what_was_saved(tmp_path):
    model, adam = save_steps(tmp_path, (1, 2, 3))
    other, eve = make_model_and_optimizer(seed=1)
    last = CheckpointManager(tmp_path, 9).read_latest()
    checkpoints.restore_checkpoint(last, other, eve)
    assert (last.step, equal(model, other)) == (3, True)
    for _ in range(3):
        step(model, adam)
        step(other, eve)
    assert equal(model, other)


@pytest.mark.slow
def test_training_goes_on_while_it_is_written_and_what_is_written_is_from_before(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096)  # 200 MB with its moments: written in more than no time
    adam = optimizer.make_optimizer(model, TrainConfig())
    checkpoints.initialize_moments(model, adam)
    before = model.weight.detach().clone()
    kept = CheckpointManager(tmp_path, 2)
    kept.save(model, adam, {**SAYS, "step": 1})
    assert kept.read_all() == []
    with torch.no_grad():
        model.weight.fill_(7)
        adam.state[model.weight]["exp_avg"].fill_(7)
    assert kept.read_all() == []
    kept.wait()
    checkpoints.restore_checkpoint(kept.read_latest(), model, adam)
    assert torch.equal(model.weight, before)
    assert not adam.state[model.weight]["exp_avg"].any()


def test_what_a_killed_process_left_is_no_checkpoint_and_goes(tmp_path):
    save_steps(tmp_path)
    (tmp_path / ".step-00000009").mkdir()
    (tmp_path / ".step-00000009" / "__0_0.distcp").write_bytes(b"half")
    kept = CheckpointManager(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert kept.read_latest().step == 1


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("harm", ["truncated", "altered", "missing"])
def test_a_file_that_is_not_what_was_written_is_named(tmp_path, file, harm):
    save_steps(tmp_path, (1, 2))
    path = tmp_path / "step-00000002" / file
    held = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        held[len(held) // 2] ^= 1
        path.write_bytes(held[:-1] if harm == "truncated" else held)
    with pytest.raises(DataError, match=rf"step-00000002/{file} is (missing|damaged).*resumes from step-00000001"):
        CheckpointManager(tmp_path, 2).read_latest()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not a checkpoint: it has no run.json"),
        ("{", "is damaged"),
        ("[1]", "is not what regard writes"),
        ("[" * 100_000, "is damaged"),
        ('{"format": "regard training", "version": 9, "step": 1}', "has version 9"),
        ('{"format": "regard recording", "version": 1, "step": 1}', "is not what regard writes"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, text, says):
    (tmp_path / "step-00000001").mkdir()
    if text is not None:
        (tmp_path / "step-00000001" / "run.json").write_text(text)
    with pytest.raises(DataError, match=says):
        CheckpointManager(tmp_path, 2).read_latest()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_steps(tmp_path, width=6)
    with pytest.raises(DataError, match="is not a checkpoint of this model"):
        checkpoints.restore_checkpoint(CheckpointManager(tmp_path, 2).read_latest(), *make_model_and_optimizer())


class Harm:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


def test_a_pickle_that_could_run_code_does_not(tmp_path):
    save_steps(tmp_path)
    folder = tmp_path / "step-00000001"
    (folder / ".metadata").write_bytes(pickle.dumps(Harm()))
    says = json.loads((folder / "run.json").read_text())
    says["files"][".metadata"] = checkpoint_header.checksum_file(folder / ".metadata")
    (folder / "run.json").write_text(json.dumps(checkpoint_header.add_checksum(says)))
    with pytest.raises(DataError, match=r"it names builtins\.exec"):
        checkpoints.restore_checkpoint(CheckpointManager(tmp_path, 2).read_latest(), *make_model_and_optimizer())
