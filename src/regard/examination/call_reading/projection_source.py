"""Find which module's output queries or keys were made from, seen through rotations and other changes that keep norms."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.examination.call_reading.rotary_reading import STYLES, Rotary, pair_columns, read_rotary, read_rotary_of_each_head
from regard.examination.report import Finding
from regard.examination.subject.call_conventions import parse_qkv

NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative spread of a ratio of norms that is constant
LEAST_TOKENS = 4  # rows (b, t) whose norms are compared: fewer would agree by chance; rows of zeros, as of pads, tell nothing
TOKENS = 16  # rows (b, t) at most whose pairs of columns are compared

BY_HEAD, BY_WIDTH, BY_LAST = "(heads, width)", "(width, heads)", "(heads, width, parts)"
EXTRA = 8  # keys that a module adds of its own, at most
SAME_PLACES = "queries, keys and values are those of the same tokens"
IN_PLACE = "Use the query, the key and the value of each token in its own place: leave out the roll, or the padding and slice."
LEAST_SHIFTED = 4  # tokens
WHO = ("queries", "keys", "values")


class ModuleOutput(NamedTuple):
    """The output of the module of this name, or its inputs times a matrix that it holds itself (`is_of_inputs`)."""

    name: str
    output: Tensor
    is_of_inputs: bool = False


class ProjectionSource(NamedTuple):
    """Where queries or keys come from: a module, the slice of its output for each head, and the factor on it.

    `projected` is that part of its output times the factor, (b, h, t, d). `is_viewed` states whether heads are a view of
    (t, h d) without a transpose, which mixes tokens and heads.
    """

    name: str
    slices: tuple[int, ...]
    factor: float
    projected: Tensor
    is_viewed: bool = False
    is_joined: bool = False  # with columns of another output, which are rotated, or of tokens in an unknown order
    slice_count: int = 0  # how many slices the output has; 0 if that is not known, or several slices fit a head
    order: str = ""  # of the columns of all heads, such as BY_HEAD; "" if it is not known, as of an output in heads
    is_ambiguous: bool = False  # several slices fit a head, so that `slices` says nothing about the heads
    shared: Tensor | None = None  # of joined columns: the last ones, (b, 1, t, n), before any rotation

    def is_equal_to(self, x: Tensor) -> bool:
        """Return whether x (b, h, t, d) is the projection itself, not one that was rotated; True if it has further tokens."""
        if self.is_joined:
            return False
        return x.shape != self.projected.shape or bool((x - self.projected).abs().max() < 1e-3 * x.abs().max())


def find_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the last output of which every head of x (b, h, t, d) has the norms, up to one factor; None if there is none.

    A module that rotates heads keeps the norms of the projection: outputs in heads whose names state no role come after others.
    After a norm of each head all outputs of norms have the norms of x: the one that x was made of is told by its columns.
    """
    near = NEAR.get(x.dtype)
    if near is None:
        return None
    ambiguous = None
    for one in sorted(outputs, key=lambda one: one.output.dim() != 4 or bool(parse_qkv(one.name.rpartition(".")[2])))[::-1]:
        for part in iterate_parts(x, one.output):
            y = arrange_tokens(one.output, part)
            found = None if y is None else match_norms(one.name, part.double().norm(dim=-1), y, x.shape[-1], near)
            if found is None or y is None:
                continue
            if one.output.dim() == 4:
                found = found._replace(order="")
            told = tell_slices_apart(part, y, found, near) if found.is_ambiguous else found
            if told is not None:
                return told
            ambiguous = ambiguous or found
    return ambiguous or find_joined_source(x, outputs)


def tell_slices_apart(x: Tensor, y: Tensor, source: ProjectionSource, near: float) -> ProjectionSource | None:
    """Return a source of which several slices have the norms of a head of x (b, h, t, d), with the slices that x was made of.

    The columns are compared, or the norms of their pairs, which a rotation keeps. None if no slice of y (b, t, n) fits, or
    several do, as equal ones.
    """
    d = x.shape[-1]
    parts = y.unflatten(-1, (-1, d)) * source.factor  # (b, t, n / d, d)
    rows = x.double().transpose(1, 2).flatten(0, 1)  # (tokens, h, d)
    known = rows.flatten(1).any(1).nonzero().flatten()[:TOKENS]
    for own, other in zip(list_rotated_norms(rows[known]), list_rotated_norms(parts.flatten(0, 1)[known]), strict=True):
        slices = []
        for head in own.unbind(1):  # (tokens, d)
            fits = ((head.unsqueeze(1) - other).abs().amax((0, 2)) < near * own.abs().max()).nonzero().flatten().tolist()
            if len(fits) != 1:
                break
            slices += fits
        if len(slices) == x.shape[1]:
            projected = parts[:, :, slices].transpose(1, 2)
            return source._replace(slices=tuple(slices), projected=projected, slice_count=parts.shape[2], is_ambiguous=False)
    return None


def list_rotated_norms(x: Tensor) -> Iterator[Tensor]:
    """Yield what each rotation keeps of x (..., d): all columns, or the norms of pairs among the first, and the others."""
    yield x
    for width in range(x.shape[-1] // 2 * 2, 1, -2):
        for style in STYLES:
            yield torch.cat([pair_columns(x[..., :width], style).abs(), x[..., width:]], -1)


def find_joined_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the output that the first columns of every head of x (b, h, t, d) are; None without one.

    The other columns are shared by all heads and have the norms of another output, as in the keys of latent attention.
    """
    b, h, t, d = x.shape
    flat = [ModuleOutput(one.name, one.output.squeeze(1) if one.output.dim() == 4 else one.output) for one in outputs]
    flat = [one for one in flat if one.output.dim() == 3 and one.output.shape[:2] == (b, t)]
    for one in flat:
        if one.output.shape[2] % h:
            continue
        heads = one.output.double().unflatten(-1, (h, -1)).transpose(1, 2)
        width = min(d - 1, heads.shape[-1])
        equal = ((heads[..., :width] - x[..., :width]).abs().amax((0, 1, 2)) < 1e-5 * x.abs().max()).int()
        n = int(equal.cumprod(0).sum())
        rest = x[..., n:].double().norm(dim=-1)
        last = next((y for y in (other.output.double() for other in flat) if n and has_last_columns(rest, y, d - n)), None)
        if last is not None:
            shared = last[..., n - d :].unsqueeze(1)
            return ProjectionSource(one.name, tuple(range(h)), 1.0, x.double(), is_joined=True, shared=shared)
    return None


def has_last_columns(norms: Tensor, y: Tensor, width: int) -> bool:
    """Return whether the last columns of y (b, t, c) have the norms (b, h, t) of every head."""
    if y.dim() != 3 or y.shape[:2] != (norms.shape[0], norms.shape[2]) or y.shape[-1] < width:
        return False
    return bool(((y[..., -width:].norm(dim=-1).unsqueeze(1) - norms).abs() < 1e-4 * norms.max()).all())


def iterate_parts(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """Yield x (b, h, t, d), or its first and its last tokens if y has a few less, as where keys of a module's own are added."""
    t = x.shape[2]
    counts = [n for n in y.shape[:2] if y.shape[:2] in ((len(x), n), (n, len(x)))]
    counts += [y.shape[2] * y.shape[3]] if y.dim() == 4 and len(y) == len(x) else []  # of a convolution
    lengths = [n for n in counts if t - EXTRA <= n < t]
    yield x
    for n in lengths[:1]:
        yield x[:, :, :n]
        yield x[:, :, t - n :]


def arrange_tokens(y: Tensor, x: Tensor) -> Tensor | None:
    """Return a module's output as (b, t, n) for x (b, h, t, d); None if it has another shape, or n is no multiple of d."""
    b, h, t, d = x.shape
    y = y.double()
    if y.dim() == 2 and len(y) == b * t:
        y = y.unflatten(0, (b, t))
    if y.dim() == 4 and y.shape[-1] == d and len(y) == b:
        y = y.transpose(1, 2) if y.shape[2] == t and (t == h or y.shape[1] != t) else y
        y = y.flatten(2) if y.shape[1] == t else y
    if y.dim() == 4 and y.shape[0] * y.shape[1] == b and y.shape[2] == t:  # windows or patches as a part of the batch
        y = y.flatten(0, 1)
    if y.dim() == 4 and len(y) == b and y.shape[2] * y.shape[3] == t:  # of a convolution
        y = y.flatten(2).transpose(1, 2)
    if y.dim() == 3 and y.shape[:2] == (t, b) and b != t:
        y = y.transpose(0, 1)
    if y.dim() == 3 and y.shape[0] == b and y.shape[1] != t <= y.shape[2] <= t + EXTRA:  # of a convolution, cut off at the end
        y = y[..., :t].transpose(1, 2)
    return y if y.dim() == 3 and y.shape[:2] == (b, t) and y.shape[-1] % d == 0 else None


def match_norms(name: str, norms: Tensor, y: Tensor, d: int, near: float) -> ProjectionSource | None:
    """Return the source if slices of width d of y (b, t, n) have the norms (b, h, t), up to one factor."""
    b, h, t = norms.shape
    if b * t < LEAST_TOKENS or not norms.isfinite().all():
        return None
    for order, parts in iterate_head_columns(y, h, d):
        found = choose_slices(norms.transpose(1, 2).flatten(0, 1), parts.norm(dim=-1).flatten(0, 1), near)
        if found is not None:
            slices, factor, is_sure = found
            projected = parts[:, :, list(slices)].transpose(1, 2) * factor
            count = parts.shape[2] if is_sure else 0
            return ProjectionSource(name, slices, factor, projected, slice_count=count, order=order, is_ambiguous=not is_sure)
    heads = y.shape[-1] // d
    if heads > 1 and h % heads == 0:  # fewer heads of keys are repeated
        viewed = y.reshape(b, heads, t, d)
        own, other = (x.transpose(1, 2).flatten(0, 1) for x in (norms, viewed.norm(dim=-1)))
        found = choose_slices(own, other, near)
        if found is not None and found[0] in (repeat_in_place(heads, h), tuple(range(heads)) * (h // heads)):
            return ProjectionSource(name, found[0], found[1], viewed[:, list(found[0])] * found[1], is_viewed=True)
    return None


def repeat_in_place(heads: int, h: int) -> tuple[int, ...]:
    """Return the heads of keys of h heads of queries: 0, 0, 1, 1 of 2 for 4."""
    return tuple(i * heads // h for i in range(h))


def iterate_head_columns(y: Tensor, h: int, d: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each order that the columns of heads of width d of y (b, t, n) may have, and the heads (b, t, n / d, d).

    In the order (width, heads), of all of y or of each block of h heads, the columns of a head are not neighbors; nor are they
    where the three, or two, tensors that one projection makes are its last axis.
    """
    yield BY_HEAD, y.unflatten(-1, (-1, d))
    count = y.shape[-1] // d
    for last in dict.fromkeys((count, h, 3, 2)) if d > 1 else ():
        if last > 1 and count % last == 0:
            order = BY_WIDTH if last in (count, h) else BY_LAST
            yield order, y.unflatten(-1, (-1, d, last)).mT.flatten(2, 3)


def choose_slices(norms: Tensor, slices: Tensor, near: float) -> tuple[tuple[int, ...], float, bool] | None:
    """Return for each head of norms (n, h) the slice (n, c) with a constant ratio, that ratio, and whether no other slice fits.

    None unless all heads have one. After a norm of each head all slices fit, and those of other norms. Rows of norm 0 are left
    out.
    """
    known = (norms > 0).all(1)
    norms, slices = norms[known], slices[known]
    if len(norms) < LEAST_TOKENS:
        return None
    ratio = norms.unsqueeze(2) / slices.unsqueeze(1).clamp_min(torch.finfo(torch.float64).tiny)  # (n, h, c)
    middle = ratio.mean(0)
    spread = ((ratio / middle - 1).abs().amax(0)).nan_to_num(nan=torch.inf)  # (h, c)
    best = spread.min(-1)
    factors = middle.gather(1, best.indices.unsqueeze(1)).flatten()
    if bool((best.values < near).all()) and float((factors / factors.mean() - 1).abs().max()) < near:
        differ = float((norms / norms.mean() - 1).abs().max()) > near
        return tuple(best.indices.tolist()), float(factors.mean()), differ and bool(((spread < near).sum(-1) == 1).all())
    return None


def read_source(x: Tensor, source: ProjectionSource | None) -> Rotary | None:
    """Return the rotation from a source's output to queries or keys; None if there is none."""
    if source is None or source.projected.shape != x.shape:
        return None
    return read_rotary(source.projected, x.double()) or read_rotary_of_each_head(source.projected, x.double())


def find_shift(x: Tensor, source: ProjectionSource | None, outputs: Sequence[ModuleOutput]) -> int:
    """Return 1 if x (b, h, t, d) has in each place what an output has for the token before, -1 for the one after, else 0.

    The tokens at the ends are left out, which may be those of the other end, or zeros.
    """
    t = x.shape[2]
    if t < LEAST_SHIFTED or (source is not None and not source.is_joined) or not x.any():
        return 0
    own = [one for one in outputs if one.output.dim() == 3 and one.output.shape[1] == t]
    for n in (1, -1):
        kept = x[:, :, 1:] if n == 1 else x[:, :, :-1]
        cut = [one._replace(output=one.output[:, :-1] if n == 1 else one.output[:, 1:]) for one in own]
        found = find_source(kept, cut)
        if found is not None and not (found.is_ambiguous or found.is_joined or found.is_viewed):
            return n
    return 0


def check_shifts(shifts: Sequence[tuple[str, tuple[int, int, int]]]) -> Finding | None:
    """Return the first of these modules whose queries, keys and values are not shifted alike; None without one."""
    for name, shift in shifts:
        who, n = next(((one, n) for one, n in zip(WHO, shift, strict=True) if n), ("", 0))
        if not n or len(set(shift)) == 1:
            continue
        return report_shift(name or "the layer", who, n, name)
    return None


def report_shift(where: str, who: str, n: int, name: str = "") -> Finding:
    """Return the finding of queries, keys or values that have in each place what the token before has, or after for n = -1."""
    here, there = (1, 0) if n == 1 else (0, 1)
    sentence = f"{who} are shifted by a token against the others: in the place of token {here} is that of token {there}"
    return Finding("wrong positions", f"in {where} {sentence}", IN_PLACE, 2.4, "positions", name)
