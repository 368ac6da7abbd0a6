import importlib.util

import pytest
import torch

from regard import ConfigError
from regard.train import begin, follow
from regard.train.listeners import tensorboard_writer
from train import small_runs

there = importlib.util.find_spec("tensorboard") is not None


@pytest.mark.skipif(there, reason="TensorBoard is installed")
def test_without_tensorboard_it_says_what_to_install(tmp_path):
    assert not tensorboard_writer.is_tensorboard_installed()
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        tensorboard_writer.TensorBoardWriter(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="needs TensorBoard, which is not installed")
@pytest.mark.filterwarnings("default")  # TensorBoard's own
def test_tensorboard_reads_every_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    small_runs.corpus(tmp_path)
    training, reports = begin(small_runs.config(tmp_path, sample_every=7, checkpoint_every=0)), []
    follow(training, [tensorboard_writer.TensorBoardWriter(tmp_path / "board"), lambda _, report: reports.append(report)])
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    for field, curve in tensorboard_writer.CURVES.items():
        expected = [(report.step, getattr(report, field)) for report in reports if getattr(report, field) is not None]
        assert [one.step for one in found.Scalars(curve)] == [step for step, _ in expected]
        rounded = torch.tensor([value for _, value in expected]).tolist()  # TensorBoard keeps float32
        assert [one.value for one in found.Scalars(curve)] == rounded
