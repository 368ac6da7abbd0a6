"""Training GPT-2's shape, random weights, beside Hugging Face's GPT-2 with torch's fused AdamW, on the same weights and tokens.

Equal are the losses of all that compute in float32, step after step; of those that round, the largest difference from
float32's is told. Each takes a few steps at its turn, of which the first are not counted: they lay out the memory.
"""

import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from benchmarks.tables import Table
from benchmarks.timing import measure_peak_megabytes
from regard import malloc
from regard.models import GPT2, GPT2Config
from regard.text.corpus import TokenBatch
from regard.train import optimizer
from regard.train.loss import compute_loss
from regard.train.single_process import SingleProcess
from regard.weights import gpt2 as files

TITLE = "Training GPT-2's shape: tokens a second, AdamW, no dropout"
COLUMNS = [
    "layers",
    "width",
    "vocabulary",
    "batch",
    "by",
    "products in",
    "step ms",
    "tokens a second",
    "of peak",
    "loss off",
    "MiB",
]
SHAPES = (  # layers, heads, width, context, vocabulary, batch
    (6, 6, 384, 256, 4096, 8),
    (6, 6, 192, 512, 2048, 8),
    (12, 12, 768, 512, 50257, 2),
)
STEPS, BEFORE, TURNS = 6, 3, 3  # at each turn, of which so many first ones are not counted
LEARNED = 3  # steps whose losses are compared
RATE, CLIP = 3e-4, 1.0


@dataclass(frozen=True)
class Contender:
    """Who trains, in what products; whether the model is compiled, and whether the memory that a step frees is kept."""

    by: str
    products: str
    compiled: bool = False
    kept: bool = False

    def stepper(self, shape: tuple[int, ...]) -> Callable[[], float]:
        """A function that takes a step and returns its loss; the weights and tokens are the same in everybody's hands."""
        layers, heads, width, t, n, b = shape
        torch.manual_seed(0)
        ours = GPT2(GPT2Config(layers=layers, heads=heads, width=width, context=t, vocabulary=n))
        tokens = torch.randint(0, n, (b, t + 1))
        batch = TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.zeros(b, t, dtype=torch.long))
        return regards(ours, batch, self.products) if self.by == "regard" else theirs(ours, batch, self)


CONTENDERS = (
    Contender("Hugging Face", "float32"),
    Contender("Hugging Face", "bfloat16"),
    Contender("Hugging Face, memory kept", "bfloat16", kept=True),
    Contender("Hugging Face, compiled", "bfloat16", compiled=True),
    Contender("regard", "float32", kept=True),
    Contender("regard", "bfloat16", kept=True),
)


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a contender and shape."""
    table = Table(TITLE, COLUMNS)
    for place, shape in enumerate(SHAPES):
        layers, _, width, t, n, b = shape
        steps = [one.stepper(shape) for one in CONTENDERS]
        losses = [[step() for _ in range(LEARNED)] for step in steps]
        off = [max(abs(x - y) for x, y in zip(each, losses[0], strict=True)) for each in losses]
        exact = [o for one, o in zip(CONTENDERS, off, strict=True) if one.products == "float32"]
        assert max(exact) < 1e-4 * losses[0][0], f"the losses of float32 differ: {losses}"
        medians = time_steps(steps)
        del steps
        work = 6 * (layers * 12 * width**2 + width * n) + 6 * layers * width * t  # half of a causal square
        for number, (one, seconds, difference) in enumerate(zip(CONTENDERS, medians, off, strict=True)):
            share = work * b * t / seconds / 1e9 / peak[torch.float32 if one.products == "float32" else torch.bfloat16]
            speed, megabytes = b * t / seconds, in_a_fresh_process(number, place)
            table.add(layers, width, n, b, one.by, one.products, seconds * 1e3, speed, share, difference, megabytes)
    return table


def time_steps(steps: list[Callable[[], float]]) -> list[float]:
    """The median seconds of each one's steps."""
    times: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    for turn in range(TURNS):
        random.Random(turn).shuffle(order)
        for place in order:
            (malloc.keep_freed_memory if CONTENDERS[place].kept else malloc.restore_malloc_defaults)()
            for step in range(STEPS):
                start = time.perf_counter()
                steps[place]()
                if step >= BEFORE:
                    times[place].append(time.perf_counter() - start)
    return [statistics.median(each) for each in times]


def in_a_fresh_process(number: int, place: int) -> float | None:
    """The peak megabytes of a contender on a shape: weights, gradients, moments, and all that a step needs."""
    command = [sys.executable, "-m", "benchmarks.training", str(number), str(place)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) if ran.stdout.strip() else None


def print_peak(number: int, place: int) -> None:
    """What the fresh process prints."""
    one = CONTENDERS[number]
    (malloc.keep_freed_memory if one.kept else malloc.restore_malloc_defaults)()
    few = (1, 2, 64, 256, 512, 4)
    if not one.compiled:
        one.stepper(few)()  # the compiled code, and what is set up at a first call

    def steps() -> None:
        step = one.stepper(SHAPES[place])
        for _ in range(STEPS):
            step()

    print(measure_peak_megabytes(steps) or "")


def theirs(ours: GPT2, batch: TokenBatch, one: Contender) -> Callable[[], float]:
    """A step of Hugging Face's GPT-2, the loss by torch's own function."""
    config = ours.config
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "n_positions": config.context}
    model = GPT2LMHeadModel(TheirConfig(vocab_size=config.vocabulary, **sizes, **dropout)).train()
    model.load_state_dict(files.convert_to_transformers(asdict(config), ours.state_dict()), strict=False)
    model.tie_weights()
    called = torch.compile(model) if one.compiled else model

    def loss() -> Tensor:
        logits = called(batch.tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())

    def update(adam: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()

    return stepper(model, loss, one.products, update)


def regards(ours: GPT2, batch: TokenBatch, products: str) -> Callable[[], float]:
    """A step as the trainer takes it."""
    model = GPT2(ours.config)
    model.load_state_dict(ours.state_dict())
    engine = SingleProcess()
    called = engine.wrap_model(model.train())

    def update(adam: torch.optim.Optimizer) -> None:
        optimizer.update_parameters(adam, RATE, float(engine.compute_gradient_norm(called)), CLIP)

    return stepper(called, lambda: compute_loss(called, batch), products, update)


def stepper(
    model: nn.Module, loss: Callable[[], Tensor], products: str, update: Callable[[torch.optim.Optimizer], None]
) -> Callable[[], float]:
    """Loss, gradient, and the update by gradients no longer than CLIP."""
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=products == "bfloat16"):
            found = loss()
        found.backward()
        update(adam)
        adam.zero_grad()
        value = float(found.detach())
        assert math.isfinite(value)
        return value

    return step


if __name__ == "__main__":
    print_peak(int(sys.argv[1]), int(sys.argv[2]))
