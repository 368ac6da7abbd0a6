"""The plan of a run on N accelerators, on paper: what each holds, what it sends in a step, and how long that takes at least.

Bytes are counted, not estimated, where they follow from shapes: weights, gradients, moments, and what autograd keeps of each
block. Of the rest, what a kernel takes while it runs, nothing is said: on a real machine add some.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import nn

from regard.errors import ConfigError
from regard.models import GPT2, GPT2Config
from regard.train.config import TrainConfig
from regard.train.flops import flops_of

FLOAT = 4  # bytes of a float32: weights at rest, gradients, moments, and sums of gradients
NUMBER = 8  # of a whole number: a token, a target


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One accelerator of several: bytes it holds, and sends in a step; floating-point operations in a step.

    together is the most it holds at a time, in the backward of the loss; of what is computed again, `recomputed` is said.
    """

    accelerators: int
    engine: str
    batch: int  # what to say in the config, so that each takes as many rows at a time as one alone would
    accumulate: int
    weights: int
    gathered: int  # weights once more, rounded or gathered, while they are used
    gradients: int
    moments: int
    activations: int
    recomputed: int  # these with activation_checkpointing
    logits: int  # what the loss keeps, and its gradient
    sent: int
    flops: float
    flops_recomputed: float  # these with activation_checkpointing

    @property
    def together(self) -> int:
        """All bytes."""
        return self.weights + self.gathered + self.gradients + self.moments + self.activations + self.logits

    @property
    def together_recomputed(self) -> int:
        """All bytes with activation_checkpointing."""
        return self.together - self.activations + self.recomputed


@dataclass(frozen=True)
class Rounding:
    """The bytes of a number in the stream between blocks, in a norm's statistics, in all else; copies of q, k, v's input."""

    stream: int
    statistic: int
    product: int
    copies: int


ROUNDING = {
    ("ddp", "float32"): Rounding(4, 4, 4, 1),
    ("ddp", "bfloat16"): Rounding(4, 4, 2, 3),  # autocast rounds it for q, for k and for v
    ("fsdp", "float32"): Rounding(4, 4, 4, 1),
    ("fsdp", "bfloat16"): Rounding(2, 2, 2, 1),
}


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model's parameters: those of a block, and those around the blocks."""

    block: tuple[torch.Size, ...]
    around: tuple[torch.Size, ...]

    @classmethod
    def of(cls, config: GPT2Config) -> "Shapes":
        """Those of a config, from the model itself, which takes no memory here."""
        with torch.device("meta"):
            model = GPT2(replace(config, layers=1))
        inside = {id(one) for one in model.blocks.parameters()}
        around = [one for one in model.parameters() if id(one) not in inside]
        return cls(shapes(model.blocks[0].parameters()), shapes(around))


def shapes(parameters: Iterable[nn.Parameter]) -> tuple[torch.Size, ...]:
    """The shapes of parameters."""
    return tuple(one.shape for one in parameters)


def planned(config: TrainConfig, accelerators: int, engine: str) -> Plan:
    """The plan of a config on so many accelerators: as many rows a step, and at a time on each, as on one."""
    if accelerators < 1:
        raise ConfigError(f"accelerators are counted from 1, got {accelerators}.")
    model, known = config.gpt2, Shapes.of(config.gpt2)
    n, layers, half = accelerators, model.layers, config.precision == "bfloat16"
    accumulate = ceil(config.accumulate / n)
    rows = ceil(config.batch * config.accumulate / (n * accumulate))
    tokens, rounding = rows * model.context, ROUNDING[engine, config.precision]
    block, around = numbers(known.block), numbers(known.around)
    whole, tensors = layers * block + around, layers * len(known.block) + len(known.around)
    product = rounding.product
    if engine == "fsdp":
        mine = layers * parts(known.block, n) + parts(known.around, n)
        gathered = product * (around + 2 * block)  # a block's, and the next one's
        gradients = FLOAT * mine + (FLOAT * whole if accumulate > 1 else product * (around + block))  # not yet exchanged
        passes = parts(known.around, n) + 2 * layers * parts(known.block, n)  # of blocks once ahead and once back
        sent = (n - 1) * (accumulate * product * passes + FLOAT * mine)
    else:
        mine = whole
        gathered = product * (whole - unrounded(model, known)) if half else 0
        gradients = FLOAT * whole
        sent = 2 * (n - 1) * FLOAT * whole // n
    flops = flops_of(model) * tokens * accumulate
    again = 2 * sum(number for part, number in model.multiply_adds(model.context).items() if part != "head") / model.context
    return Plan(
        accelerators=n,
        engine=engine,
        batch=rows * n,
        accumulate=accumulate,
        weights=FLOAT * mine,
        gathered=gathered,
        gradients=gradients,
        moments=2 * FLOAT * mine + FLOAT * tensors,  # and how often each was changed
        activations=kept(model, tokens, rounding, layers),
        recomputed=kept(model, tokens, rounding, 1) + (layers - 1) * tokens * model.width * rounding.stream,
        logits=logits(model, tokens, half),
        sent=sent,
        flops=flops,
        flops_recomputed=flops + again * tokens * accumulate,
    )


def kept(model: GPT2Config, tokens: int, rounding: Rounding, blocks: int) -> int:
    """The bytes that autograd keeps of so many blocks, of the embeddings and of the last norm.

    Of a block: the stream before each norm, the norms' outputs and statistics, q, k, v, the context and its log-sum-exp, and
    the feed-forward layer before and after its activation; the weights of attention never.
    """
    c, product = model.width, rounding.product
    feed = model.inner if model.activation == "relu" else 2 * model.inner  # relu needs only what it gave
    norm = c * rounding.stream + 2 * rounding.statistic
    block = 2 * norm + (rounding.copies + 1) * c * product + 4 * c * product + FLOAT * model.heads + feed * product
    return tokens * (blocks * block + norm + c * product + 2 * NUMBER)


def logits(model: GPT2Config, tokens: int, half: bool) -> int:
    """The bytes of the loss in its backward: log-probabilities and their gradient, in float32, and that of rounded logits."""
    return tokens * model.vocabulary * (2 * FLOAT + (2 if half else 0))


def unrounded(model: GPT2Config, known: Shapes) -> int:
    """The parameters of which autocast keeps no copy: vectors, and the embeddings that are no head."""
    vectors = sum(shape.numel() for shape in (*known.around, *known.block * model.layers) if len(shape) < 2)
    return vectors + model.context * model.width + (0 if model.tied else model.vocabulary * model.width)


def numbers(known: Sequence[torch.Size]) -> int:
    """How many numbers tensors have."""
    return sum(shape.numel() for shape in known)


def parts(known: Sequence[torch.Size], n: int) -> int:
    """How many numbers of tensors the first of n processes has: fsdp cuts each along its first axis."""
    return sum(ceil(shape[0] / n) * prod(shape[1:]) for shape in known)


def table(config: TrainConfig, plans: Sequence[Plan], *, columns: int = 80, link: float = 0.0) -> str:
    """The plans side by side, as many as a screen has room for.

    Times are said where config.peak_tflops and link, in gigabytes a second that each accelerator can send, are stated.
    """
    heads = [str(one.accelerators) if one.accelerators == 1 else f"{one.accelerators} {one.engine}" for one in plans]
    titles, cells = rows_of(config, plans, link)
    left, right = max(map(len, titles)), [max(len(head), *map(len, one)) + 2 for head, one in zip(heads, cells, strict=True)]
    blocks, at = [title(config, columns)], 0
    while at < len(plans):
        room = at + 1
        while room < len(plans) and left + sum(right[at : room + 1]) <= columns:
            room += 1
        lines = [" " * left + "".join(head.rjust(width) for head, width in zip(heads[at:room], right[at:room], strict=True))]
        for number, name in enumerate(titles):
            here = (cell[number].rjust(width) for cell, width in zip(cells[at:room], right[at:room], strict=True))
            lines.append((name.ljust(left) + "".join(here)).rstrip())
        blocks.append("\n".join(lines))
        at = room
    return "\n\n".join(blocks)


def rows_of(config: TrainConfig, plans: Sequence[Plan], link: float) -> tuple[list[str], list[list[str]]]:
    """The names of the rows, and the cells of each plan."""
    titles = ["batch", "accumulate", "GB held: weights", "  rounded, gathered", "  gradients", "  moments", "  activations"]
    titles += ["  logits", "  together", "recomputed: held", "  together", "GB sent in a step"]
    cells = [
        [f"{one.batch:,}", f"{one.accumulate:,}"]
        + [gigabytes(x) for x in (one.weights, one.gathered, one.gradients, one.moments, one.activations, one.logits)]
        + [gigabytes(x) for x in (one.together, one.recomputed, one.together_recomputed, one.sent)]
        for one in plans
    ]
    if config.peak_tflops:
        titles += ["seconds: products", "  recomputed"]
        for cell, one in zip(cells, plans, strict=True):
            cell += [seconds(x / (config.peak_tflops * 1e12)) for x in (one.flops, one.flops_recomputed)]
    if link:
        titles.append("  exchanges" if config.peak_tflops else "seconds: exchanges")
        for cell, one in zip(cells, plans, strict=True):
            cell.append(seconds(one.sent / (link * 1e9)))
    return titles, cells


def title(config: TrainConfig, columns: int) -> str:
    """What is planned, in as many lines as it needs."""
    model, rows = config.gpt2, config.batch * config.accumulate
    says = [
        f"{model.parameters:,} parameters: {model.layers} layers of {model.heads} heads, width {model.width:,}, "
        f"context {model.context:,}, vocabulary {model.vocabulary:,}",
        f"a step of {rows:,} rows, {rows * model.context:,} tokens, {config.precision}",
    ]
    if model.dropout:
        says.append("dropout is not counted: attention with dropout keeps its weights, context x context")
    return "\n".join(textwrap.fill(one, columns) for one in says)


def gigabytes(number: float) -> str:
    """Bytes, in billions."""
    return f"{number / 1e9:,.2f}"


def seconds(number: float) -> str:
    """Seconds, three digits of them."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"
