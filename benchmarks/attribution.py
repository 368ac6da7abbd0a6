"""What attribution costs: GPT-2's shape with random weights, one number, and the pull on it of every weight of all 144 heads.

Plain is a forward and a backward to the input embeddings by F.scaled_dot_product_attention; attribution records the forward,
makes the same backward and computes the overview of the pull of each layer; eager keeps the weights of every layer in the graph
and their gradients, as inseq and captum do, and multiplies them.
"""

import math
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.tables import Cell, Table
from benchmarks.timing import held, peak_megabytes, seconds, timed
from regard.observe import record
from regard.observe.attribution import Attribution

LENGTHS, EAGER_UP_TO = (1024, 2048, 4096), 1024
LAYERS = 12
TITLE = "GPT-2's shape, float32: forward and backward, and with the overview of the pull of all 144 heads"
COLUMNS = ["T", "plain ms", "with pull", "exponent", "eager", "MiB: plain", "MiB: with pull", "exponent", "MiB: eager"]
DOES_NOT_FIT = "does not fit"


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the plain passes, and the others as ratios to it; memory above the model in fresh processes."""
    table = Table(TITLE, [*COLUMNS, "a row ms"])
    check()
    before: tuple[float, float] | None = None
    for t in LENGTHS:
        model, x = make_model(), make_input(t)
        ways: dict[str, Callable[[], Tensor]] = {"plain": partial(run_plain, model, x), "pull": partial(run_pull, model, x)}
        if t <= EAGER_UP_TO:
            ways["eager"] = partial(run_eager, model, x)
        found = timed(ways, 1e-2).medians
        plain, pull, eager = (measure_memory(name, t) for name in ("plain", "pull", "eager"))
        now = found["pull"], pull if isinstance(pull, float) else math.nan
        slopes = [math.log2(one / other) for one, other in zip(now, before, strict=True)] if before else [None, None]
        ratio = found["eager"] / found["plain"] if "eager" in found else None
        row_ms = measure_row(model, x)
        table.add(t, found["plain"], found["pull"] / found["plain"], slopes[0], ratio, plain, pull, slopes[1], eager, row_ms)
        before = now
    return table


def make_model() -> GPT2Model:
    """The model, the same each time, its parameters frozen: only the embeddings and what follows from them get gradients."""
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_positions=max(LENGTHS))).eval().requires_grad_(False)


def make_input(t: int) -> Tensor:
    """Embeddings (1, t, 768) that require a gradient."""
    return torch.randn(1, t, 768, generator=torch.Generator().manual_seed(t)).mul_(0.02).requires_grad_()


def choose_number(hidden: Tensor) -> Tensor:
    """A number of the last token, as a logit is."""
    direction = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0))
    return hidden[0, -1] @ direction


def check() -> None:
    """That the pull is the one of the dense weights and their gradients."""
    model, x = make_model(), make_input(300)
    attribution = attribute_number(model, x)[1]
    for layer, theirs in enumerate(compute_eager_pull(model, x)[1]):
        pull, size = attribution.map(layer), theirs.abs().sum(-1).max()
        sums = (pull.overview().row_sums - theirs.sum(-1)).abs().max()
        difference = max(sums, (pull.dense() - theirs).abs().max()) / size
        assert difference < 1e-4, f"the pull is off by {difference:.1e} of its size"


def attribute_number(model: GPT2Model, x: Tensor) -> tuple[Tensor, Attribution]:
    """The number, and its attribution."""
    with record(model, keep="values") as recording:
        number = choose_number(model(inputs_embeds=x, use_cache=False).last_hidden_state)
    return number, recording.attribute(number)


def compute_eager_pull(model: GPT2Model, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The number, and the weights of each layer times their gradients, (1, h, t, t)."""
    model.set_attn_implementation("eager")
    try:
        output = model(inputs_embeds=x, use_cache=False, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    number = choose_number(output.last_hidden_state)
    gradients = torch.autograd.grad(number, output.attentions)
    return number, [weights.detach() * gradient for weights, gradient in zip(output.attentions, gradients, strict=True)]


def run_plain(model: GPT2Model, x: Tensor) -> Tensor:
    number = choose_number(model(inputs_embeds=x, use_cache=False).last_hidden_state)
    torch.autograd.grad(number, x)
    return number


def run_pull(model: GPT2Model, x: Tensor) -> Tensor:
    number, attribution = attribute_number(model, x)
    for layer in range(LAYERS):
        attribution.map(layer).overview()
    return number


def run_eager(model: GPT2Model, x: Tensor) -> Tensor:
    number, pulls = compute_eager_pull(model, x)
    for one in pulls:
        one.sum(-1)
    return number


def measure_row(model: GPT2Model, x: Tensor) -> float:
    """Milliseconds of a row of the pull of one head, after its overview."""
    pull = attribute_number(model, x)[1].map(LAYERS // 2)
    pull.overview()
    return 1e3 * min(seconds(lambda: pull[0, 0, -1]) for _ in range(5))


def measure_memory(name: str, t: int) -> Cell:
    """The peak megabytes of a way above the model, in a fresh process; or that it does not fit into this machine's memory."""
    command = [sys.executable, "-m", "benchmarks.attribution", name, str(t)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    last = ran.stdout.split("\n")[-2] if ran.stdout.strip() else ""
    return last if last == DOES_NOT_FIT else float(last) if last else None


def print_peak(name: str, t: int) -> None:
    """What the fresh process prints. Memory beyond what is free is refused, so that no other process is ended for it."""
    ways = {"plain": run_plain, "pull": run_pull, "eager": run_eager}
    model = make_model()
    run_pull(model, make_input(300))  # the compiled code, and what is set up at a first call
    limit = int(1024 * held("VmSize")) + read_free_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        print(peak_megabytes(partial(ways[name], model, make_input(t))) or "")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        print(DOES_NOT_FIT)


def read_free_bytes() -> int:
    """The memory of the machine that is available."""
    with open("/proc/meminfo") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


if __name__ == "__main__":
    print_peak(sys.argv[1], int(sys.argv[2]))
