"""How long an examination takes: layers of width 768 with 12 heads, a model of GPT-2's shape, and other projects' layers.

Of each of the three its verdict is proven first: the right one has no finding, and the same with a leak has the one that
names it. Of the layers of docs/public.py, those whose package is installed are examined, once each.
"""

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from docs.public import PUBLIC
from torch import Tensor, nn

import regard
from benchmarks.tables import Table
from benchmarks.timing import measure_peak_megabytes, measure_seconds
from regard import GPT2, Causal, Everything, GPT2Config
from regard.mechanism import heads

WIDTH, HEADS, ROUNDS = 768, 12, 5
LEAKING = 7  # the layer of the model that leaks
TITLE = "an examination, float32"
COLUMNS = ["subject", "parameters", "forwards", "seconds", "bound, seconds", "peak MiB above its weights"]


@dataclass(frozen=True)
class Subject:
    """How a subject is made, what leaks in a wrong one, and how long its examination may take."""

    make: Callable[[], nn.Module]
    leak: Callable[[nn.Module], None]
    where: str
    most_seconds: float


def make_subject(make: Callable[[], nn.Module]) -> nn.Module:
    """A subject with random weights."""
    torch.manual_seed(0)
    return make().eval()


def own_leak(layer: nn.Module) -> None:
    """One of regard's, which hides nothing any more."""
    attention = layer.blocks[LEAKING].attention if isinstance(layer, GPT2) else layer

    def seeing(x: Tensor, *_: object) -> Tensor:
        return attention.out_proj(heads.join(regard.attention(*attention.project(x), Everything())))

    attention.forward = seeing  # type: ignore[method-assign]


def torch_leak(layer: nn.Module) -> None:
    """torch's, which forgets its mask."""
    plain = layer.forward
    layer.forward = lambda *given, **named: plain(*given, **{**named, "attn_mask": None})


SUBJECTS = {
    "regard.MultiHeadAttention": Subject(
        partial(regard.MultiHeadAttention, WIDTH, WIDTH, 1024, 0.0, HEADS), own_leak, "token", 0.5
    ),
    "nn.MultiheadAttention": Subject(partial(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True), torch_leak, "token", 0.5),
    "GPT-2, 12 layers": Subject(lambda: GPT2(GPT2Config.small()), own_leak, f"blocks.{LEAKING}.attention", 10),
}


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each subject."""
    table = Table(TITLE, COLUMNS)
    for name, subject in SUBJECTS.items():
        prove(subject)
        layer = make_subject(subject.make)
        times = [measure_seconds(lambda layer=layer: regard.examine(layer)) for _ in range(ROUNDS)]
        parameters = sum(one.numel() for one in layer.parameters())
        table.add(
            name,
            f"{parameters:,}",
            forwards(layer),
            statistics.median(times),
            subject.most_seconds,
            in_a_fresh_process(name),
        )
    public = [measure_seconds(one.report) for one in PUBLIC if one.version is not None]
    for what, measure in (("the median", statistics.median), ("the longest", max)) if public else ():
        table.add(f"{len(public)} public layers, {what}", None, None, measure(public), None, None)
    return table


def prove(subject: Subject) -> None:
    """AssertionError unless the right one is clean, and the one that leaks is found, at its door."""
    right = regard.examine(make_subject(subject.make))
    assert right, str(right)
    wrong = make_subject(subject.make)
    subject.leak(wrong)
    found = regard.examine(wrong, expects=Causal()).findings[0]
    assert found.kind == "future leak", found
    assert subject.where in found.evidence, found


def forwards(layer: nn.Module) -> int:
    """How often the subject itself is called; copies of it, in float64 or in training, are not counted."""
    calls: list[None] = []
    handle = layer.register_forward_hook(lambda *_: calls.append(None))
    regard.examine(layer)
    handle.remove()
    return len(calls)


def in_a_fresh_process(name: str) -> float | None:
    """The peak megabytes of an examination, above the subject."""
    ran = subprocess.run([sys.executable, "-m", "benchmarks.examining", name], capture_output=True, text=True, check=True)
    return float(ran.stdout) if ran.stdout.strip() else None


def print_peak(name: str) -> None:
    """What the fresh process prints."""
    small = GPT2(GPT2Config(layers=1, heads=1, width=8, context=8, vocabulary=9))
    regard.examine(small if name.startswith("GPT") else regard.MultiHeadAttention(8, 8, 8, 0.0, 2))  # what a first call sets up
    layer = make_subject(SUBJECTS[name].make)
    print(measure_peak_megabytes(lambda: regard.examine(layer)) or "")


if __name__ == "__main__":
    print_peak(sys.argv[1])
