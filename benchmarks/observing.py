"""What it costs to watch heads form: a look at every head, beside the steps between two looks.

Equal is what is learned: a run that is looked at after each step has the losses of one that is not, to the bit.
"""

import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.tables import Table
from benchmarks.timing import measure_seconds
from regard.models import GPT2Config
from regard.text import BytePair
from regard.text.corpus import prepare
from regard.train import TrainConfig, begin
from regard.train.listeners.head_observer import HeadObserver
from regard.train.training_loop import loop

TITLE = "Watching heads form: a look at every head on two texts of 128 tokens, every 200 steps"
COLUMNS = ["layers", "heads", "width", "batch", "step ms", "a look ms", "share of the time, every 200 steps"]
SHAPES = ((6, 6, 192, 512, 2048, 16), (6, 6, 384, 256, 4096, 8))  # layers, heads, width, context, vocabulary, batch
EVERY, STEPS, WARM = 200, 8, 2


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a shape."""
    table = Table(TITLE, COLUMNS)
    for layers, heads, width, context, vocabulary, batch in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            root, size = Path(folder), batch * context * STEPS
            words = " ".join(map(str, torch.randint(0, 10**6, (size,), generator=torch.Generator().manual_seed(0)).tolist()))
            prepare([words], BytePair.train([words], vocabulary), root / "corpus", workers=1)
            model = GPT2Config(layers=layers, heads=heads, width=width, context=context, vocabulary=vocabulary)
            settings = {"corpus": str(root / "corpus"), "model": model, "steps": STEPS, "batch": batch, "precision": "bfloat16"}
            settings |= {"evaluate_every": 0, "checkpoint_every": 0, "peak_tflops": 1.0}
            plain, _, _ = train_observed(TrainConfig(out=str(root / "plain"), **settings), None)
            seen, step, look = train_observed(TrainConfig(out=str(root / "seen"), **settings), root / "heads.jsonl")
            assert seen == plain, "a run that is looked at learns something else"
            table.add(layers, heads, width, batch, step * 1e3, look * 1e3, look / (EVERY * step + look))
    return table


def train_observed(config: TrainConfig, heads: Path | None) -> tuple[list[float], float, float]:
    """The losses of a run, and the median seconds of a step and of a look."""
    training = begin(config)
    observation = None if heads is None else HeadObserver(heads, 1)
    losses, steps, looks = [], [], []
    for report in loop(training):
        losses.append(report.loss_nats)
        steps.append(report.seconds)
        if observation is not None:
            looks.append(measure_seconds(lambda: observation(training, report)))  # noqa: B023
    return losses, statistics.median(steps[WARM:]), statistics.median(looks[WARM:]) if looks else 0.0
