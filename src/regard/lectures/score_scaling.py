"""Why scores are divided by √d: dot products of random vectors, and their softmax, measured at many widths."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.lectures.example_steps import Example, ExampleStep, StepTable
from regard.mechanism import Steps, attend, softmax

WIDTHS = (1, 4, 16, 64, 256, 1024, 4096)
SEED = 123
KEYS, NUMBERS = 16, 2**22  # keys of each query; most numbers drawn for the keys of one width


@dataclass(frozen=True)
class ScoreStatistics:
    """Statistics of scores and of their softmax: means over many queries, each with keys of its own.

    gradient is the Frobenius norm of ∂ weights / ∂ scores; entropy is in nats.
    """

    variance: float
    largest: float
    entropy: float
    gradient: float


@functools.cache
def measure_scores(width: int, seed: int = 123) -> tuple[ScoreStatistics, ScoreStatistics]:
    """Measure the dot products of vectors of this width with mean 0 and variance 1: undivided, and divided by √d."""
    queries = min(4096, NUMBERS // (KEYS * width))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, 1, 1, width, generator=generator)  # (b, h, q, d)
    k = torch.randn(queries, 1, KEYS, width, generator=generator)
    v = k[..., :1]
    plain, scaled = attend(q, k, v, scale=1.0), attend(q, k, v)
    return compute_statistics(plain), compute_statistics(scaled)


def compute_statistics(steps: Steps) -> ScoreStatistics:
    """Compute the statistics of these steps, (b, 1, 1, k)."""
    weights = steps.weights
    return ScoreStatistics(
        variance=steps.scaled.var().item(),
        largest=weights.amax(-1).mean().item(),
        entropy=torch.special.entr(weights).sum(-1).mean().item(),
        gradient=softmax_gradients(steps.scaled.flatten(0, -2)).norm(dim=(-2, -1)).mean().item(),
    )


def softmax_gradients(scores: Tensor) -> Tensor:
    """Compute ∂ softmax(s) / ∂ s = diag(w) - w wᵀ of each row, (rows, k, k)."""
    weights = softmax.stable(scores)
    return weights.diag_embed() - weights[:, :, None] * weights[:, None, :]


def build_scale_example() -> Example:
    """Why scores are divided by √d: dot products of random vectors, and their softmax, as d grows from 1 to 4096."""
    rows = [measure_scores(width, SEED) for width in WIDTHS]
    labels = tuple(f"d = {width}" for width in WIDTHS)
    plain, scaled = rows[-1]

    def show_quantity(name: str, formula: str, quantity: str, sentence: str) -> ExampleStep:
        values = torch.tensor([[getattr(one, quantity) for one in pair] for pair in rows])
        return ExampleStep(name, formula, sentence, (StepTable(values, labels, ("q·k", "q·k / √d")),))

    return Example(
        name="scale",
        title="Why divide by √d",
        source="measured here",
        before=(
            show_quantity(
                "variance", "var(q·k)", "variance", "The variance of a dot product is d; divided by √d it stays near 1."
            ),
            show_quantity(
                "largest weight",
                "max softmax(scores)",
                "largest",
                f"Undivided, the softmax of wide vectors puts nearly all ({plain.largest:.2f}) on one of {KEYS} keys.",
            ),
            show_quantity(
                "entropy",
                "-Σ w ln w, in nats",
                "entropy",
                f"The entropy, at most ln {KEYS} = 2.77 nats, collapses to {plain.entropy:.2f}; "
                f"divided by √d it keeps {scaled.entropy:.2f}.",
            ),
            show_quantity(
                "gradient",
                "‖∂ weights / ∂ scores‖",
                "gradient",
                f"The gradient of a collapsed softmax shrinks to {plain.gradient:.3f}; the division keeps "
                f"{scaled.gradient:.2f}.",
            ),
        ),
        notes=(f"Random vectors of mean 0 and variance 1, seed {SEED}; each query chooses among {KEYS} keys.",),
        leads_to="simple",
    )
