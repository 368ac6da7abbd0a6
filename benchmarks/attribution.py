"""What attribution costs: GPT-2's shape with random weights, one number, and the pull on it of every weight of all 144 heads.

Plain is a forward and a backward to the input embeddings by F.scaled_dot_product_attention; with pull records the forward,
makes the same backward and computes the overview of the pull of each layer; eager keeps the weights of every layer in the graph
and their gradients, and multiplies them; captum's LayerGradientXActivation does the same. TransformerLens estimates by
attribution patching what each head's output does, from a forward on other tokens and a backward: less, with its patterns in the
graph.
"""

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.recording import make_bridge
from benchmarks.tables import Cell, Table
from benchmarks.timing import measure_peak_megabytes, measure_seconds, time_contenders
from regard.observe import record
from regard.observe.attribution import Attribution

SHORT, LENGTHS, MOST = 512, (1024, 4096), 4096
LAYERS = 12
GIBIBYTES = 24  # above the model: the lengths at which the ways take as much are from the fits of their peaks
PACKAGES = {"captum": "captum", "lens": "transformer_lens"}
TITLE = "GPT-2's shape, float32: forward and backward, and with the overview of the pull of all 144 heads"
WAYS = {"plain": "plain", "pull": "with pull", "eager": "eager", "captum": "captum", "lens": "TransformerLens"}
SIZES = (SHORT, *LENGTHS)  # at which memory is measured
COLUMNS = ["way", *(f"T = {t}: ratio" for t in LENGTHS), *(f"MiB, T = {t}" for t in SIZES), "T at 24 GiB", "a row ms"]
Way = Callable[[], Tensor]


def run(peak: dict[torch.dtype, float]) -> Table:
    """The time of each way relative to the plain passes, its peak above the model in fresh processes, and how far it gets."""
    table = Table(TITLE, COLUMNS)
    check()
    times = {t: time_contenders(make_ways(t), 1e-2, rounds=1 if t == MOST else 2).medians for t in LENGTHS}
    model = make_model()
    row_ms = measure_row(model, make_input(model, MOST))
    for name, title in WAYS.items():
        if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name]):
            table.add(f"{title}: not installed", *[None] * (len(COLUMNS) - 1))
            continue
        ratios = [times[t][name] / times[t]["plain"] if name in times[t] else None for t in LENGTHS]
        peaks = {t: measure_memory(name, t) for t in (LENGTHS if name in times[MOST] else (SHORT, LENGTHS[0]))}
        cells = [peaks.get(t) for t in SIZES]
        table.add(title, *ratios, *cells, find_longest(peaks), row_ms if name == "pull" else None)
    return table


def find_longest(peaks: dict[int, float | None]) -> Cell:
    """The tokens at which a T + c T², through the peaks at the two largest lengths, reaches the budget."""
    known = [(t, peak) for t, peak in peaks.items() if peak is not None]
    if len(known) < 2:  # not on Linux
        return None
    (t, one), (u, other) = known[-2:]
    square = max((other / u - one / t) / (u - t), 0.0)
    slope = other / u - square * u
    budget = 1024 * GIBIBYTES
    return round(budget / slope if not square else (math.sqrt(slope**2 + 4 * square * budget) - slope) / (2 * square))


def make_ways(t: int) -> dict[str, Way]:
    """What runs at a length: at the largest only the ways that keep no weights."""
    model = make_model()
    x = make_input(model, t)
    names = [name for name in RUNS if t < MOST or name in ("plain", "pull")]
    names = [name for name in names if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])]
    return {name: prepare(name, model, x) for name in names}


def prepare(name: str, model: GPT2Model, x: Tensor) -> Way:
    """A way, ready to run."""
    if name == "lens":
        return partial(run_lens, make_bridge(model, draw_direction()), make_tokens(x.shape[1]), make_tokens(x.shape[1], 1))
    return partial(RUNS[name], model, x)


def make_model() -> GPT2Model:
    """The model, the same each time, its parameters frozen: only the embeddings and what follows from them get gradients."""
    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_positions=MOST)).eval().requires_grad_(False)


def make_tokens(t: int, seed: int = 0) -> Tensor:
    """Tokens (1, t)."""
    return torch.randint(0, 50257, (1, t), generator=torch.Generator().manual_seed(t + seed))


def make_input(model: GPT2Model, t: int) -> Tensor:
    """Embeddings (1, t, 768) that require a gradient."""
    return model.wte(make_tokens(t)).detach().requires_grad_()


def draw_direction() -> Tensor:
    """A direction of the last vector, as the unembedding of a token is."""
    return torch.randn(768, generator=torch.Generator().manual_seed(0))


def choose_number(hidden: Tensor) -> Tensor:
    """A number of the last token, as a logit is."""
    return hidden[0, -1] @ draw_direction()


def check() -> None:
    """That the pull is the one of the dense weights and their gradients, by whichever way they are found."""
    model = make_model()
    x = make_input(model, 300)
    attribution = attribute_number(model, x)[1]
    ways = [compute_eager_pull(model, x)[1]]
    if importlib.util.find_spec("captum"):
        ways.append(compute_captum_pull(model, x)[1])
    for pulls in ways:
        for layer, theirs in enumerate(pulls):
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


def compute_captum_pull(model: GPT2Model, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The number, and captum's gradient times activation of the weights, which have to pass through a module: the dropout."""
    from captum.attr import LayerGradientXActivation

    numbers: list[Tensor] = []

    def forward(embeddings: Tensor) -> Tensor:
        numbers.append(choose_number(model(inputs_embeds=embeddings, use_cache=False).last_hidden_state))
        return numbers[-1][None]

    model.set_attn_implementation("eager")
    for block in model.h:
        block.attn.reorder_and_upcast_attn = True  # the one path that calls it as a module; in float32 it changes nothing
    try:
        found = LayerGradientXActivation(forward, [block.attn.attn_dropout for block in model.h]).attribute(x)
    finally:
        model.set_attn_implementation("sdpa")
        for block in model.h:
            block.attn.reorder_and_upcast_attn = False
    return numbers[-1], [one[0] if isinstance(one, tuple) else one for one in found]


def run_plain(model: GPT2Model, x: Tensor) -> Tensor:
    number = choose_number(model(inputs_embeds=x, use_cache=False).last_hidden_state)
    torch.autograd.grad(number, x)
    return number


def run_pull(model: GPT2Model, x: Tensor) -> Tensor:
    number, attribution = attribute_number(model, x)
    for layer in range(LAYERS):
        attribution.map(layer).overview()
    return number


def run_dense(compute: Callable[[GPT2Model, Tensor], tuple[Tensor, list[Tensor]]], model: GPT2Model, x: Tensor) -> Tensor:
    number, pulls = compute(model, x)
    for one in pulls:
        one.sum(-1)
    return number


def run_lens(model: torch.nn.Module, tokens: Tensor, others: Tensor) -> Tensor:
    """The number, after the estimates Σ g (z' - z) of all heads, with z the output of a head and z' that on other tokens."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(LAYERS)]
    with torch.no_grad():
        _, cache = model.run_with_cache(others, names_filter=names)
    outputs: dict[str, Tensor] = {}

    def keep(z: Tensor, hook: object, name: str) -> Tensor:
        outputs[name] = z
        return z

    hooks = [("hook_embed", lambda x, hook: x.detach().requires_grad_()), *((name, partial(keep, name=name)) for name in names)]
    number = model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1, 0]
    gradients = torch.autograd.grad(number, [outputs[name] for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        (gradient * (cache[name] - outputs[name].detach())).sum((1, 3))
    return number


RUNS: dict[str, Callable[..., Tensor]] = {
    "plain": run_plain,
    "pull": run_pull,
    "eager": partial(run_dense, compute_eager_pull),
    "captum": partial(run_dense, compute_captum_pull),
    "lens": run_lens,
}


def measure_row(model: GPT2Model, x: Tensor) -> float:
    """Milliseconds of a row of the pull of one head, after its overview."""
    pull = attribute_number(model, x)[1].map(LAYERS // 2)
    pull.overview()
    return 1e3 * min(measure_seconds(lambda: pull[0, 0, -1]) for _ in range(5))


def measure_memory(name: str, t: int) -> float | None:
    """The peak megabytes of a way above the model, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.attribution", name, str(t)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) if ran.stdout.strip() else None


def print_peak(name: str, t: int) -> None:
    """What the fresh process prints."""
    model = make_model()
    run_pull(model, make_input(model, 300))  # the compiled code, and what is set up at a first call
    way = prepare(name, model, make_input(model, t))
    prepare(name, model, make_input(model, 64))()
    print(measure_peak_megabytes(way) or "")


if __name__ == "__main__":
    print_peak(sys.argv[1], int(sys.argv[2]))
