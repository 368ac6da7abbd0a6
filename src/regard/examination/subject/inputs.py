"""Find inputs that a subject takes: widths from the parameters of its module, or by trial; small and seeded."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError, ShapeError
from regard.examination import mask_requirements
from regard.examination.subject.adapters import SubjectAdapter
from regard.examination.subject.call_conventions import PLAIN, Form
from regard.examination.subject.restore_state import take_snapshot
from regard.mechanism import Mask

HEADS, WIDTH = 3, 8  # of a function, which takes any sizes
WIDTH_NAMES = (
    "d_in",
    "embed_dim",
    "d_model",
    "hidden_size",
    "n_embd",
    "width",
    "dim",
    "in_features",
    "embed_size",
    "emb_dim",
    "d",
)
LENGTH_NAMES = (
    "context_length",
    "block_size",
    "max_seq_len",
    "max_len",
    "seq_len",
    "context",
    "n_positions",
    "max_length",
    "T",
)
NO_CONTEXT = "a context is a floating tensor"  # the message for a subject that runs and returns something else
OTHER_WIDTH = "shapes cannot be multiplied"  # the error of a linear layer of another width
UNPACKED = "values to unpack"  # the error of a shape unpacked with another number of axes, as for images
GUESSED = ("TypeError", "AssertionError", "ConfigError")  # errors that depend on how a subject is called
LONGEST = 2048  # tokens to try
LAST_LENGTHS = (4, 3, 2, 8, 16, 32, 64, 128)  # lengths to try last: short ones, and multiples of block sizes


@dataclass(frozen=True)
class InputShapes:
    """The shapes of inputs: x (b, t, width); or q (b, heads, t - gap, width), k (b, groups, t, width), v as k of `value`."""

    form: Form
    width: int
    tokens: int = mask_requirements.USUAL
    batch: int = 2
    heads: int = HEADS
    groups: int = HEADS
    value: int = WIDTH
    gap: int = 0  # keys before the first query
    bound: bool = False  # to these numbers of tokens and sequences
    most: int | None = None  # the largest number of tokens to try, None without limit
    spread: float = 1.0

    def make(
        self, t: int | None, b: int, seed: int, size: float, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        """Draw seeded normal numbers times size, the same in every dtype. Raises ShapeError for more than `most` tokens."""
        t = self.tokens if t is None or self.bound else t
        b = self.batch if self.bound else b
        if self.most is not None and t > self.most:
            raise ShapeError(f"the sample has {self.most} tokens, but {t} are needed; pass a longer one.")
        draw = torch.Generator().manual_seed(seed)
        shapes: list[tuple[int, ...]] = [(b, t, self.width)]
        if self.form == "qkv":
            shapes = [
                (b, self.heads, t - self.gap, self.width),
                (b, self.groups, t, self.width),
                (b, self.groups, t, self.value),
            ]
        made = [torch.randn(shape, generator=draw, dtype=torch.float64) * (size * self.spread) for shape in shapes]
        return tuple(x.to(device, dtype) for x in made)


class RefusedError(Exception):
    """Raised if no way of calling a subject gives a context; `errors` lists what each way raised, the likeliest first.

    `run` is a call that ran and gave something else than a context, None if there was none.
    """

    def __init__(self, errors: Sequence[str], sure: bool, run: Callable[[], object] | None) -> None:
        super().__init__(*errors)
        self.errors, self.sure, self.run = errors, sure, run


def find_working_inputs(
    ways: Sequence[SubjectAdapter], expects: Mask, sample: Sequence[Tensor] | None, offset: int
) -> tuple[SubjectAdapter, InputShapes]:
    """Return the first way of calling that works, and the shapes that it takes. Raises RefusedError if none works."""
    tried = list(match_sample(ways, sample, expects) if sample is not None else guess_from_parameters(ways, expects, offset))
    snapshot = None if ways[0].module is None else take_snapshot(ways[0].module)
    errors: list[str] = []
    run: Callable[[], object] | None = None
    axes = 0  # of a function's tensors when it ran without giving a context: fewer axes would mean another operation
    for subject, shapes in tried:
        if subject.form == "qkv" and subject.rank < axes:
            continue
        given = sample and tuple(x.to(subject.dtype) for x in add_missing_axes(sample, subject.form))
        inputs = given or shapes.make(None, shapes.batch, 0, 1.0, subject.dtype, subject.device)
        wrong = describe_refusal(subject, inputs)
        if snapshot is not None:
            snapshot.restore()
        if wrong is None:
            return subject, shapes
        errors.append(wrong)
        if run is None and NO_CONTEXT in wrong:
            run = functools.partial(subject.call, *inputs)
        if subject.form == "qkv" and NO_CONTEXT in wrong:
            axes = subject.rank
    errors.sort(key=lambda error: OTHER_WIDTH in error)  # the error of a width that fits tells more
    raise RefusedError(errors, is_own_error(ways[0], errors[0], sample is not None), run)


def is_own_error(way: SubjectAdapter, error: str, sampled: bool) -> bool:
    """Return whether an error comes from the subject itself, not from guessed inputs."""
    if NO_CONTEXT in error:
        return False  # nothing raised
    if sampled:
        return not error.startswith("ConfigError")
    return has_certain_width(way.module) and way.note == PLAIN and UNPACKED not in error and not error.startswith(GUESSED)


def describe_refusal(subject: SubjectAdapter, inputs: Sequence[Tensor]) -> str | None:
    """Describe why a subject rejects these inputs; None if it returns a context of their length."""
    try:
        with torch.no_grad():
            context = subject.call(*(x.clone() for x in inputs)).context  # the subject may write to its inputs
    except RegardError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # a user's layer may raise anything
        return f"{type(error).__name__} on {format_shapes(inputs)}: {get_first_line(error)}"
    first = inputs[0]
    expected = (*first.shape[:-1],) if subject.form == "qkv" else first.shape[:2]
    if context.shape[:-1] != expected or not context.is_floating_point():
        came = f"{context.dtype} {tuple(context.shape)}"
        return f"for {format_shapes(inputs)} it returned {came}; {NO_CONTEXT} ({', '.join(map(str, expected))}, c)"
    return None


def match_sample(
    ways: Sequence[SubjectAdapter], sample: Sequence[Tensor], expects: Mask
) -> Iterator[tuple[SubjectAdapter, InputShapes]]:
    """Yield the ways that take a sample as it is, with its dtype and device if the subject has none of its own.

    Raises ConfigError if no way takes as many tensors.
    """
    form: Form = "x" if len(sample) == 1 else "qkv"
    ranked = [way for way in ways if way.form == form]
    if len(sample) not in (1, 3) or not ranked:
        takes = " or ".join(sorted({"x" if way.form == "x" else "(q, k, v)" for way in ways}))
        raise ConfigError(f"sample must be {takes} for {ways[0].name}; got {len(sample)} tensor{'s' * (len(sample) > 1)}.")
    rank = sample[0].dim()
    exact = [way for way in ranked if way.rank == rank] or ranked
    if form == "qkv" and rank == 4:
        exact.sort(key=lambda way: way.has_key_heads != (sample[1].dim() == 4))
    wide = add_missing_axes(sample, form)
    spread = max(float(x.double().std()) for x in sample) if sample[0].numel() > 1 else 1.0
    for way in exact:
        owned = way.module is not None and any(x.is_floating_point() for x in (*way.module.parameters(), *way.module.buffers()))
        subject = way if owned else replace(way, dtype=sample[0].dtype, device=sample[0].device)
        b, t = len(wide[0]), wide[-1].shape[-2]
        shapes = InputShapes(
            form, wide[0].shape[-1], t, b, most=t, bound=expects.is_batch_specific, spread=spread if 0 < spread < 1e4 else 1.0
        )
        if form == "qkv":
            q, k, v = wide
            shapes = replace(shapes, heads=q.shape[1], groups=k.shape[1], value=v.shape[-1], gap=t - q.shape[-2])
        yield subject, shapes


def add_missing_axes(sample: Sequence[Tensor], form: str) -> tuple[Tensor, ...]:
    """Return a sample with the axes of a call: x (b, t, c), or q, k, v (b, h, t, d)."""
    if form == "x":
        return tuple(x if x.dim() == 3 else x.unsqueeze(0) for x in sample)
    return tuple(x if x.dim() == 4 else x.unsqueeze(1) if x.dim() == 3 else x[None, None] for x in sample)


def guess_from_parameters(
    ways: Sequence[SubjectAdapter], expects: Mask, offset: int
) -> Iterator[tuple[SubjectAdapter, InputShapes]]:
    """Yield every way with every width that the parameters suggest, and every length that they or the expectation suggest."""
    module, fixed = ways[0].module, expects.is_batch_specific
    lengths = mask_requirements.choose_token_counts(expects)
    for width in guess_widths(module):
        ours = lengths + [t for t in guess_lengths(module, width) if t not in lengths]
        for t in ours if fixed else [*ours, *(n for n in LAST_LENGTHS if n not in ours)]:
            for way in ways:
                if way.form == "qkv" and (t <= offset or (t == HEADS and t not in ours)):
                    continue  # with as many tokens as heads, (b, t, h, d) looks like (b, h, t, d)
                heads = HEADS if way.rank == 4 else 1
                groups = heads if way.has_key_heads else 1
                gap = max(offset, 0) if way.form == "qkv" else 0
                yield (
                    way,
                    InputShapes(
                        way.form, width, t, mask_requirements.choose_batch_size(expects), heads, groups, width, gap, fixed
                    ),
                )


def guess_widths(module: nn.Module | None) -> list[int]:
    """Return the widths that an input may have, the likeliest first."""
    if module is None or not any(True for _ in (*module.parameters(), *module.buffers())):
        return [WIDTH]
    found = [*list_named_widths(module), *list_layer_widths(module)]
    found += sorted({size for one in module.parameters() for size in one.shape if size > 1})
    if not found:  # quantized weights are buffers
        parts = list(module.modules())
        found = [size for part in parts if (size := get_int_attribute(part, "in_features")) > 0]
        found += sorted({size for part in parts for one in part.buffers(recurse=False) for size in one.shape if size > 1})
    return list(dict.fromkeys(found)) or [WIDTH]


def list_named_widths(module: nn.Module) -> list[int]:
    """Return the widths among a module's attributes with a name in NAMES."""
    return [size for name in WIDTH_NAMES if (size := get_int_attribute(module, name)) > 0]


def get_int_attribute(module: nn.Module, name: str) -> int:
    """Return an integer attribute of a module; 0 if there is none, or if a property raises."""
    try:
        value = getattr(module, name, None)
    except Exception:  # a property may raise anything
        return 0
    return value if isinstance(value, int) else 0


def list_layer_widths(module: nn.Module) -> Iterator[int]:
    """Yield the input widths of a module's layers: of its projections in the order in which it holds them, then of norms."""
    parts = list(module.modules())
    for part in parts:
        if isinstance(part, nn.Linear):
            yield part.in_features
        elif isinstance(part, nn.MultiheadAttention):
            yield part.embed_dim
        else:
            yield from (one.shape[0] for one in part.parameters(recurse=False) if one.dim() == 2)
    yield from (part.normalized_shape[-1] for part in parts if isinstance(part, nn.LayerNorm))


def has_certain_width(module: nn.Module | None) -> bool:
    """Return whether the width is certain, so that an error is the module's own: its first layer takes vectors."""
    parts = module.modules() if module is not None else ()
    first = next((part for part in parts if any(one.dim() > 1 for one in part.parameters(recurse=False))), None)
    return first is not None and next(list_layer_widths(first), None) is not None and not isinstance(first, nn.Embedding)


def guess_lengths(module: nn.Module | None, width: int) -> list[int]:
    """Return the lengths that a module may be made for: by attribute names, sizes of its masks, and learned positions."""
    if module is None:
        return []
    named = [get_int_attribute(part, name) for part in module.modules() for name in LENGTH_NAMES]
    sides = [one.shape[-1] for one in module.buffers() if one.dim() >= 2 and one.shape[-1] == one.shape[-2]]
    learned = [one.shape[-2] for one in module.parameters() if one.dim() == 3 and len(one) == 1 and one.shape[-1] == width]
    learned += [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    return list(dict.fromkeys(t for t in [*named, *sides, *learned] if 0 < t <= LONGEST))


def format_shapes(inputs: Sequence[Tensor]) -> str:
    """Format the shapes of inputs for an error message."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("x" if len(inputs) == 1 else "qkv", inputs, strict=True))


def get_first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
