"""The estimated cost of a run on N accelerators: what each holds, what it sends in a step, and the least time that this takes.

Bytes are counted, not estimated, if they follow from shapes: weights, gradients, moments, and what autograd saves of each
block. The working memory of kernels is not included: a real machine needs somewhat more.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod

import torch
from torch import nn

from regard.errors import ConfigError
from regard.models import GPT2, GPT2Config
from regard.observe.text_table import align_in_blocks
from regard.train.config import TrainConfig

FLOAT = 4  # bytes of a float32: weights at rest, gradients, moments, and sums of gradients
NUMBER = 8  # bytes of an int64: a token, a target


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """One of several accelerators: the bytes it holds, and sends in a step; floating-point operations in a step.

    together is the most it holds at a time, in the backward pass of the loss; `recomputed` replaces the activations if they are
    computed again.
    """

    accelerators: int
    engine: str
    batch: int  # the setting with which each takes as many rows at a time as a single one would
    accumulate: int
    weights: int
    gathered: int  # copies of weights, rounded or gathered, while they are used
    gradients: int
    moments: int
    activations: int
    recomputed: int  # activations with activation_checkpointing
    logits: int  # saved by the loss, and their gradient
    sent: int
    flops: float
    flops_recomputed: float  # flops with activation_checkpointing

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.weights + self.gathered + self.gradients + self.moments + self.activations + self.logits

    @property
    def total_bytes_recomputed(self) -> int:
        """All bytes with activation_checkpointing."""
        return self.total_bytes - self.activations + self.recomputed


@dataclass(frozen=True)
class NumberSizes:
    """Bytes of a number between blocks, in a norm's statistics, and elsewhere; copies of the input of q, k and v."""

    stream: int
    statistic: int
    product: int
    copies: int


NUMBER_SIZES = {
    ("ddp", "float32"): NumberSizes(4, 4, 4, 1),
    ("ddp", "bfloat16"): NumberSizes(4, 4, 2, 3),  # autocast copies the input for q, for k and for v
    ("fsdp", "float32"): NumberSizes(4, 4, 4, 1),
    ("fsdp", "bfloat16"): NumberSizes(2, 2, 2, 1),
}


@dataclass(frozen=True)
class ParameterShapes:
    """The shapes of a model's parameters: those of one block, and those outside the blocks."""

    block: tuple[torch.Size, ...]
    around: tuple[torch.Size, ...]

    @classmethod
    def from_config(cls, config: GPT2Config) -> "ParameterShapes":
        """Return the shapes of a config, from a model on the meta device, which takes no memory."""
        with torch.device("meta"):
            model = GPT2(replace(config, layers=1))
        inside = {id(one) for one in model.blocks.parameters()}
        around = [one for one in model.parameters() if id(one) not in inside]
        return cls(list_shapes(model.blocks[0].parameters()), list_shapes(around))


def list_shapes(parameters: Iterable[nn.Parameter]) -> tuple[torch.Size, ...]:
    """Return the shapes of parameters."""
    return tuple(one.shape for one in parameters)


def estimate_cost(config: TrainConfig, accelerators: int, engine: str) -> CostEstimate:
    """Estimate the cost of a config on n accelerators: rows per step as on one, rounded up, and no more at a time on each."""
    if accelerators < 1:
        raise ConfigError(f"accelerators are counted from 1, got {accelerators}.")
    model, known = config.gpt2, ParameterShapes.from_config(config.gpt2)
    n, layers, half = accelerators, model.layers, config.precision == "bfloat16"
    accumulate = ceil(config.accumulate / n)
    rows = ceil(config.batch * config.accumulate / (n * accumulate))
    tokens, rounding = rows * model.context, NUMBER_SIZES[engine, config.precision]
    block, around = count_elements(known.block), count_elements(known.around)
    total, tensors = layers * block + around, layers * len(known.block) + len(known.around)
    product = rounding.product
    if engine == "fsdp":
        mine = layers * count_shard_elements(known.block, n) + count_shard_elements(known.around, n)
        gathered = product * (around + 2 * block)  # of a block, and of the next one
        gradients = FLOAT * mine + (FLOAT * total if accumulate > 1 else product * (around + block))  # those not exchanged yet
        # of blocks once forward and once backward
        passes = count_shard_elements(known.around, n) + 2 * layers * count_shard_elements(known.block, n)
        sent = (n - 1) * (accumulate * product * passes + FLOAT * mine)
    else:
        mine = total
        gathered = product * (total - count_uncast_parameters(model, known)) if half else 0
        gradients = FLOAT * total
        sent = 2 * (n - 1) * FLOAT * total // n
    flops = model.training_flops * tokens * accumulate
    again = 2 * sum(number for part, number in model.multiply_adds(model.context).items() if part != "head") / model.context
    return CostEstimate(
        accelerators=n,
        engine=engine,
        batch=rows * n,
        accumulate=accumulate,
        weights=FLOAT * mine,
        gathered=gathered,
        gradients=gradients,
        moments=2 * FLOAT * mine + FLOAT * tensors,  # and the step count of each tensor
        activations=count_activation_bytes(model, tokens, rounding, layers),
        recomputed=count_activation_bytes(model, tokens, rounding, 1) + (layers - 1) * tokens * model.width * rounding.stream,
        logits=count_logit_bytes(model, tokens, half),
        sent=sent,
        flops=flops,
        flops_recomputed=flops + again * tokens * accumulate,
    )


def count_activation_bytes(model: GPT2Config, tokens: int, rounding: NumberSizes, blocks: int) -> int:
    """Return the bytes that autograd saves of `blocks` blocks, of the embeddings and of the last norm.

    Of a block: the input of each norm, the norms' outputs and statistics, q, k, v, the context and its log-sum-exp, and the
    feed-forward layer before and after its activation; never the attention weights.
    """
    c, product = model.width, rounding.product
    feed = model.inner if model.activation == "relu" else 2 * model.inner  # the backward pass of relu needs only its output
    norm = c * rounding.stream + 2 * rounding.statistic
    block = 2 * norm + (rounding.copies + 1) * c * product + 4 * c * product + FLOAT * model.heads + feed * product
    return tokens * (blocks * block + norm + c * product + 2 * NUMBER)


def count_logit_bytes(model: GPT2Config, tokens: int, half: bool) -> int:
    """Return the bytes of the loss's backward pass: float32 log-probabilities, their gradient, and that of rounded logits."""
    return tokens * model.vocabulary * (2 * FLOAT + (2 if half else 0))


def count_uncast_parameters(model: GPT2Config, known: ParameterShapes) -> int:
    """Return the number of parameters that autocast does not copy: vectors, and embeddings that are not the head."""
    vectors = sum(shape.numel() for shape in (*known.around, *known.block * model.layers) if len(shape) < 2)
    return vectors + model.context * model.width + (0 if model.tied else model.vocabulary * model.width)


def count_elements(known: Sequence[torch.Size]) -> int:
    """Return the number of elements of tensors of these shapes."""
    return sum(shape.numel() for shape in known)


def count_shard_elements(known: Sequence[torch.Size], n: int) -> int:
    """Return the number of elements that the first of n processes holds: fsdp splits each tensor along its first axis."""
    return sum(ceil(shape[0] / n) * prod(shape[1:]) for shape in known)


def format_estimates(config: TrainConfig, estimates: Sequence[CostEstimate], *, columns: int = 80, link: float = 0.0) -> str:
    """Return the estimates side by side, as many as fit the width of the screen.

    Times are included if config.peak_tflops and link, the gigabytes per second that each accelerator can send, are given.
    Raises ConfigError for a link that is no rate.
    """
    if not 0 <= link < inf:
        raise ConfigError(f"link must be gigabytes per second, 0 or more, got {link}.")
    heads = [str(one.accelerators) if one.accelerators == 1 else f"{one.accelerators} {one.engine}" for one in estimates]
    titles, cells = format_rows(config, estimates, link)
    lines = [[title, *(cell[n] for cell in cells)] for n, title in enumerate(titles)]
    return "\n".join([describe_run(config, columns), "", *align_in_blocks(["", *heads], lines, columns)])


def format_rows(config: TrainConfig, estimates: Sequence[CostEstimate], link: float) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the rows, and the cells of each estimate."""
    titles = ["batch", "accumulate", "GB held: weights", "  rounded, gathered", "  gradients", "  moments", "  activations"]
    titles += ["  logits", "  together", "recomputed: held", "  together", "GB sent in a step"]
    cells = [
        [f"{one.batch:,}", f"{one.accumulate:,}"]
        + [format_gigabytes(x) for x in (one.weights, one.gathered, one.gradients, one.moments, one.activations, one.logits)]
        + [format_gigabytes(x) for x in (one.total_bytes, one.recomputed, one.total_bytes_recomputed, one.sent)]
        for one in estimates
    ]
    if config.peak_tflops:
        titles += ["seconds: products", "  recomputed"]
        for cell, one in zip(cells, estimates, strict=True):
            cell += [format_seconds(x / (config.peak_tflops * 1e12)) for x in (one.flops, one.flops_recomputed)]
    if link:
        titles.append("  exchanges" if config.peak_tflops else "seconds: exchanges")
        for cell, one in zip(cells, estimates, strict=True):
            cell.append(format_seconds(one.sent / (link * 1e9)))
    return titles, cells


def describe_run(config: TrainConfig, columns: int) -> str:
    """Describe the planned run, wrapped to the given number of columns."""
    model, rows = config.gpt2, config.batch * config.accumulate
    says = [
        f"{model.parameters:,} parameters: {model.layers} layers of {model.heads} heads, width {model.width:,}, "
        f"context {model.context:,}, vocabulary {model.vocabulary:,}",
        f"a step of {rows:,} rows, {rows * model.context:,} tokens, {config.precision}",
    ]
    if model.dropout:
        says.append("dropout is not counted: attention with dropout keeps its weights, context x context")
    return "\n".join(textwrap.fill(one, columns) for one in says)


def format_gigabytes(number: float) -> str:
    """Format bytes in billions."""
    return f"{number / 1e9:,.2f}"


def format_seconds(number: float) -> str:
    """Format seconds with three significant digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"
