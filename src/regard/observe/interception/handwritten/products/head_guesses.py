"""Guesses of which axes are heads, by the numbers of heads that modules state and the shapes of their inputs.

They decide where the functions that made queries and values do not show it.
"""

import math
from dataclasses import replace

import torch

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors
from regard.observe.interception.thread_state import STATE

GUESSED = (
    "which axis holds heads was guessed from the order of the axes and the sizes of its inputs, as no function shows it: "
    "its {} heads may be rows of the batch, and these heads"
)


def describe_guess(table: AxisTable, dims: list[Axes], before: Axes, heads: Axes) -> str:
    """Return a note if axes of batch and heads that were guessed could be exchanged; nothing where only one guess fits.

    `dims` are the axes of the dimensions that hold both. Only one fits where a module states as many heads as one dimension has
    and the others have not, or where the batch of an input is as long as one and not as the other.
    """
    rows, count = (math.prod(table.get_sizes(table.expand_axes(axes))) for axes in (before, heads))
    if rows == 1 or count == 1:
        return ""
    sizes = [math.prod(table.get_sizes(table.expand_axes(axes))) for axes in dims]
    own = [{*table.expand_axes(axes)} for axes in dims]
    others = [size for size, axes in zip(sizes, own, strict=True) if not axes & {*table.expand_axes(heads)}]
    is_alone = {*table.expand_axes(heads)} in own
    shape = find_input_shape(3)
    is_stated = is_alone and count in find_head_counts() and count not in others
    is_batch_known = is_alone and len(others) == 1 and shape is not None and others[0] == shape[0] != count
    return "" if is_stated or is_batch_known else GUESSED.format(count)


def note_guess(call: AttentionCall | RecurrenceCall, guess: str) -> AttentionCall | RecurrenceCall:
    """Return a call with the note of a guess, unless that is empty."""
    if not guess:
        return call
    if isinstance(call, AttentionCall):
        return replace(call, note="; ".join(filter(None, (call.note, guess))))

    def read_factors() -> RecurrenceFactors:
        factors = call.read()
        return replace(factors, note="; ".join(filter(None, (factors.note, guess))))

    return replace(call, read=read_factors)


def split_grouped_heads(table: AxisTable, batch: list[Axes], other: set[int], tokens: set[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads, with heads that share values last.

    `batch` are the dimensions of weights but those of queries and keys, without axes where their size is 1; `other` are axes of
    values. Axes that the values lack are of heads if they and the axis of heads make a number of heads that a module states, or
    if none states any and they stand behind the dimensions of batch and heads. There is no axis of heads where the innermost
    module that states their number states 1.
    """
    stated = find_head_counts(least=1)
    if stated[:1] == [1]:
        return tuple(axis for axes in batch for axis in axes), ()
    head_counts = [count for count in stated if count > 1]
    shared = [axes for axes in batch if axes and not set(axes) & other]
    own = [axes for axes in batch if axes not in shared]
    if shared and len(own) > 1:
        before, heads = split_heads(table, own, tokens, head_counts)
        grouped = tuple(axis for axes in (heads, *shared) for axis in axes)
        if math.prod(table.get_sizes(grouped)) in head_counts or (not head_counts and batch == [*own, *shared]):
            return before, grouped
    return split_heads(table, [axes for axes in batch if axes], tokens, head_counts)


def split_heads(table: AxisTable, batch: list[Axes], tokens: set[int], head_counts: list[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads among the dimensions that are neither queries nor keys.

    `head_counts` are the numbers of heads that modules state.
    """
    sizes = [math.prod(table.get_sizes(axes)) for axes in batch]
    if len(batch) == 1:
        return split_single(table, batch[0], head_counts, tokens)
    fits = [n for n, size in enumerate(sizes) if size in head_counts and n]
    if not head_counts and len(batch) == 2:
        shape = find_input_shape(3)
        fits = [n for n in (0, 1) if shape is not None and sizes[1 - n] in shape[:2] and sizes[n] not in shape[:2]]
    joined = [] if fits else find_joined_heads(sizes, head_counts)
    if len(joined) == 1:
        n, count = joined[0]
        outer, heads = split_axes(table, batch[n], count)
        return tuple(axis for m, axes in enumerate(batch) for axis in (outer if m == n else axes)), heads
    place = fits[0] if len(fits) == 1 else len(batch) - 1
    return tuple(axis for n, axes in enumerate(batch) if n != place for axis in axes), batch[place] if batch else ()


def find_joined_heads(sizes: list[int], head_counts: list[int]) -> list[tuple[int, int]]:
    """Return the places of the sizes that are a batch times a number of heads that a module states, each with that number."""
    shape = find_input_shape()
    counts = dict.fromkeys(head_counts if shape is not None and shape[0] else [])
    return [(n, count) for n, size in enumerate(sizes) for count in counts if shape is not None and size == shape[0] * count]


def count_tokens(table: AxisTable, *groups: Axes) -> set[int]:
    """Return the numbers of tokens of groups of axes."""
    return {math.prod(table.get_sizes(axes)) for axes in groups}


def split_single(table: AxisTable, axes: Axes, head_counts: list[int], tokens: set[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads in a dimension that may hold both, as that of bmm.

    The number of heads is one that a module states and that leaves a batch of its input, or a batch of windows that make up the
    tokens of its input, or what the batch of the input leaves.
    The batch of an input (1, b, c), such as the state of a recurrent layer, is its second axis, unless that may be tokens.
    """
    size = math.prod(table.get_sizes(axes))
    shape = find_input_shape()
    if shape is None:
        return ((), axes) if any(x.dim() > 1 for frame in STATE.frames for x in frame.input_tensors) else (axes, ())
    heads = next((n for n in head_counts if size % n == 0 and is_batch(size // n, shape, tokens)), 0)
    if not heads and shape[0] == 1 and size == shape[1] and size not in tokens:
        return axes, ()
    heads = heads or (size // shape[0] if shape[0] and size % shape[0] == 0 else 1)
    return split_axes(table, axes, heads)


def is_batch(size: int, shape: torch.Size, tokens: set[int]) -> bool:
    """Return whether a size is the batch of an input (b, t, c), (t, b, c) or (b, c, rows, columns), or that of its windows."""
    windows = size // shape[0] if shape[0] and size % shape[0] == 0 else 0
    return size in shape[:2] or any(windows * t in (shape[1:-1].numel(), shape[2:].numel()) for t in tokens if windows)


def split_axes(table: AxisTable, axes: Axes, heads: int) -> tuple[Axes, Axes]:
    """Return axes of batch and of heads, the last ones; none of heads if their number splits none of several axes."""
    for n in range(len(axes) + 1):
        if math.prod(table.get_sizes(axes[n:])) == heads:
            return axes[:n], axes[n:]
    if len(axes) > 1:
        return axes, ()
    outer, inner = table.split_axis(axes[0], math.prod(table.get_sizes(axes)) // heads)
    return (outer,), (inner,)


def find_input_shape(most: int = 0) -> torch.Size | None:
    """Return the shape of the first input with a batch of the running modules, of the innermost first; None without one.

    With `most`, only of inputs of floating-point numbers with so many axes at most.
    """
    inputs = (x for frame in reversed(STATE.frames) for x in frame.input_tensors if x.dim() > 2)
    return next((x.shape for x in inputs if not most or (x.dim() <= most and x.is_floating_point())), None)
