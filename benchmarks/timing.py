"""Contenders proven equal, then timed in turn; the most memory one of them takes."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

Contenders = Mapping[str, Callable[[], Tensor]]
SECONDS, LONG = 4.0, 20.0  # about what one row of a table may take; and what is long for one round of it
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Timed:
    """Milliseconds of each contender in each round, and the largest difference among what they computed."""

    runs: dict[str, list[float]]
    difference: float

    @property
    def rounds(self) -> int:
        return len(next(iter(self.runs.values())))

    @property
    def medians(self) -> dict[str, float]:
        """Of each contender over the rounds."""
        return {name: statistics.median(times) for name, times in self.runs.items()}

    def ratio(self, name: str, to: str) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratios within a round, where a machine's drift falls out."""
        ratios = [one / other for one, other in zip(self.runs[name], self.runs[to], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        return lower, middle, upper


def time_contenders(
    contenders: Contenders,
    tolerance: float,
    beside: Contenders = MappingProxyType({}),
    within: float = SECONDS,
    rounds: int | None = None,
) -> Timed:
    """The medians of contenders that compute the same, each run once a round; AssertionError where they do not.

    What runs `beside` them computes something else, and is timed in the same rounds as a yardstick. They take about so many
    seconds, but for those that take long: three rounds are the fewest, unless their number is given.
    """
    start = time.perf_counter()
    results = {name: run().detach() for name, run in contenders.items()}
    first_time = time.perf_counter() - start
    first = next(iter(results.values()))
    difference = max(float((first - result).abs().max()) for result in results.values())
    assert difference <= tolerance, f"the contenders differ by {difference:.1e}, more than {tolerance:.1e}: {list(contenders)}"
    del results, first
    contenders = {**contenders, **beside}
    if rounds is None:
        once = first_time if first_time > LONG else sum(measure_seconds(run) for run in contenders.values())
        rounds = max(3 if once > 3 * LONG else 5 if once > LONG else 9, min(2000, round(within / once)))
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffle = list(contenders), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # what one leaves behind in the memory is not always the same one's to bear
        for name in order:
            runs[name].append(1e3 * measure_seconds(contenders[name]))
    return Timed(runs, difference)


def measure_seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_peak_megabytes(run: Callable[[], object]) -> float | None:
    """The most memory the process held while it ran, in MiB, above what it held before; None where Linux does not tell.

    It is for a fresh process: what an older one freed and kept is not counted when it is taken again.
    """
    if not RESET.exists():
        return None
    RESET.write_text("5")  # sets the peak to what is held now
    before = read_process_kilobytes("VmRSS")
    run()
    return (read_process_kilobytes("VmHWM") - before) / 1024


def read_process_kilobytes(field: str) -> float:
    """A figure of the process in kB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return float(line.split()[1])


def forward_and_backward(run: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], Tensor]:
    """A run that ends in the gradients of its leaves, one after the other in one tensor."""

    def both() -> Tensor:
        output = run()
        found = torch.autograd.grad(output, leaves, torch.ones_like(output))
        return torch.cat([gradient.flatten() for gradient in found])

    return both
