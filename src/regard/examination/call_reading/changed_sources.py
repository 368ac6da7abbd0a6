"""Find which module's output queries or keys were made from where norms do not show it.

A constant was added, heads come from different modules, tokens stand in another order, queries have a factor of their position,
pairs of columns grow or decay with the position (XPos), or tokens were mixed by a parameter (Linformer).
Sources: Sun et al. 2022, A Length-Extrapolatable Transformer, section 3.1; Wang et al. 2020, Linformer, equation 7.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from regard.examination.call_reading.projection_source import (
    LEAST_TOKENS,
    NEAR,
    ModuleOutput,
    ProjectionSource,
    arrange_tokens,
    find_source,
    match_norms,
)
from regard.examination.call_reading.rotary_reading import STYLES, pair_columns, read_rotary

MOST_NUMBERS = 2**22  # of what is solved for


def find_changed_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the output that x (b, h, t, d) is up to a constant, head by head, or in another order; None if there is none."""
    if x.dtype not in NEAR or x.shape[-1] < 2:
        return None
    finds = (
        find_source_before_split,
        find_shifted_source,
        find_source_of_each_head,
        find_reordered_source,
        find_tempered_source,
    )
    for find in finds:
        found = find(x, outputs)
        if found is not None:
            return found
    return None


def find_source_before_split(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the output that all heads of x (b, h, t, d) together are, rotated before they were split; None without one."""
    d, places = x.shape[-1], list[int]()  # of each head among those that differ
    for i in range(x.shape[1]):
        is_repeated = i > 0 and torch.equal(x[:, i], x[:, i - 1])
        places.append(places[-1] if is_repeated else len(set(places)))
    own = [places.index(n) for n in sorted(set(places))]
    joined = x[:, own].transpose(1, 2).flatten(2).unsqueeze(1)
    found = find_source(joined, outputs) if len(own) > 1 else None
    if found is None or found.is_joined or read_rotary(found.projected, joined.double()) is None:
        return None
    heads = found.projected.squeeze(1).unflatten(-1, (-1, d)).transpose(1, 2)[:, places]
    slices = tuple(found.slices[0] * len(own) + n for n in places)
    return found._replace(slices=slices, projected=heads, slice_count=0)


def find_shifted_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the last output of which every head of x (b, h, t, d) is a multiple plus a constant; None if there is none."""
    (b, _, t, d), near = x.shape, NEAR[x.dtype]
    if b * t < LEAST_TOKENS:
        return None
    moved = center_tokens(x.double().transpose(1, 2))  # (b, t, h, d)
    for one in reversed(outputs):
        y = arrange_tokens(one.output, x)
        if y is None:
            continue
        parts = center_tokens(y.unflatten(-1, (-1, d)))
        products, squares = torch.einsum("bthd,btnd->hn", moved, parts), parts.square().sum((0, 1, 3))
        factors = products / squares.clamp_min(torch.finfo(torch.float64).tiny)
        rest = 1 - factors * products / moved.square().sum((0, 1, 3)).unsqueeze(1)  # relative, squared
        best = rest.nan_to_num(nan=1.0).min(1)
        own = factors.gather(1, best.indices.unsqueeze(1)).flatten()
        if bool((best.values < near**2).all()) and float((own / own.mean() - 1).abs().max()) < near:
            is_sure = bool(((rest < near**2).sum(1) == 1).all())
            slices = tuple(best.indices.tolist())
            count = parts.shape[2] if is_sure else 0
            return ProjectionSource(
                one.name, slices, float(own.mean()), x.double(), slice_count=count, is_ambiguous=not is_sure
            )
    return None


def find_tempered_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the last output of which x (b, h, t, d) has the norms up to a factor of each token, 1 for the first; None without.

    The factors are those of positions, the same in all heads and sequences, as the temperature of Llama 4.
    """
    b, h, t, _ = x.shape
    norms = x.double().norm(dim=-1)
    if b * h < LEAST_TOKENS or t < 2 or not bool(norms.isfinite().all()):
        return None
    for one in reversed(outputs):
        y = arrange_tokens(one.output, x)
        if y is None or y.shape[-1] != h * x.shape[-1]:
            continue
        own = y.unflatten(-1, (h, -1)).transpose(1, 2)
        factors = (norms / own.norm(dim=-1)).nanmean((0, 1)).nan_to_num(1.0).unsqueeze(-1)  # (t, 1)
        if abs(float(factors[0]) - 1) > NEAR[x.dtype]:
            continue
        found = find_source((x.double() / factors).to(x.dtype), [one])
        if found is not None and not found.is_ambiguous and found.projected.shape == x.shape:
            return found._replace(projected=found.projected * factors)
    return None


def center_tokens(x: Tensor) -> Tensor:
    """Return x (b, t, n, d) without its mean over all tokens."""
    return x - x.mean((0, 1), keepdim=True)


def find_source_of_each_head(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the outputs that the heads of x (b, h, t, d) come from, as one source, if they are several with one factor."""
    if x.shape[1] == 1:
        return None
    found: list[ProjectionSource] = []
    for i in range(x.shape[1]):
        one = find_source(x[:, i : i + 1], outputs)
        if one is None or one.is_joined or abs(one.factor / (found or [one])[0].factor - 1) > NEAR[x.dtype]:
            return None
        found.append(one)
    places = [(one.name, one.slices[0]) for one in found]
    if len({one.name for one in found}) == 1 or len(set(places)) < len(places):
        return None
    paths = [one.name.split(".") for one in found]
    shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
    return ProjectionSource(
        ".".join(shared), tuple(range(len(found))), found[0].factor, torch.cat([one.projected for one in found], 1)
    )


def find_reordered_source(x: Tensor, outputs: Sequence[ModuleOutput]) -> ProjectionSource | None:
    """Return the last output with the tokens of x (b, h, t, d) in windows, which are a part of b; None if there is none.

    The sorted norms of one head and of a slice are equal up to one factor, which gives the order. Where heads and windows are
    not told apart, the norms of all heads together are compared, and the source has no slices.
    """
    (b, _, t, d), near = x.shape, NEAR[x.dtype]
    norms = x.double().norm(dim=-1)
    if norms.numel() < 2 * LEAST_TOKENS or not bool(norms.isfinite().all()):
        return None
    first = norms[:, 0].flatten().sort()
    for one in reversed(outputs):
        if len(one.output) == b:  # no windows: another order of a sequence's own tokens may be a mistake
            continue
        for rows in iterate_rows(one.output.double(), d):
            found = rows.unflatten(-1, (-1, d)).norm(dim=-1)  # (n, slices)
            for s in range(found.shape[1]) if len(rows) == b * t else ():
                own = found[:, s].sort()
                if measure_factor(first.values, own.values, near) is None:
                    continue
                order = torch.empty_like(own.indices)
                order[first.indices] = own.indices
                source = match_norms(one.name, norms, rows[order].view(b, t, -1), d, near)
                if source is not None:
                    return source
            for part in iterate_column_groups(found, norms.numel()):
                factor = measure_factor(norms.flatten().sort().values, part.flatten().sort().values, near)
                if factor is not None:
                    return ProjectionSource(one.name, (), factor, x.double(), is_joined=True)  # rotated or not
    return None


def iterate_rows(y: Tensor, d: int) -> Iterator[Tensor]:
    """Yield an output as rows of tokens (n, c), with its channels last or second, if c is a multiple of d."""
    for axis in (-1, 1) if y.dim() > 2 else (-1,):
        rows = y.movedim(axis, -1).flatten(0, -2)
        if rows.shape[1] % d == 0:
            yield rows


def iterate_column_groups(norms: Tensor, count: int) -> Iterator[Tensor]:
    """Yield neighboring columns of norms (n, slices) with `count` numbers together: the queries', the keys', the values'."""
    n, slices = norms.shape
    size = count // n
    if size * n == count and size and slices % size == 0:
        yield from norms.unflatten(1, (-1, size)).unbind(1)


def measure_factor(one: Tensor, other: Tensor, near: float) -> float | None:
    """Return the factor up to which two sorted vectors are equal; None if they are not, or all their numbers are the same."""
    factor = float(one.sum() / other.sum().clamp_min(1e-30))
    is_equal = bool((one - factor * other).abs().max() < near * one.max())
    return factor if is_equal and float(one.max() - one.min()) > 10 * near * float(one.max()) else None


def find_decayed_sources(
    q: Tensor, k: Tensor, outputs: Sequence[ModuleOutput]
) -> tuple[ProjectionSource, ProjectionSource] | None:
    """Return the sources of queries and keys whose pairs of columns grow with the position in one and decay in the other.

    The factor of a pair at token n is ζ ** n for queries (b, h, t, d) and ζ ** -n for keys, so that scores have ζ ** (n - m).
    The source of the queries has the factor of both.
    """
    if q.dtype not in NEAR or q.shape[2] != k.shape[2] or q.shape[-1] % 2 or q.shape[2] < 3:
        return None
    near = NEAR[q.dtype]
    for style in STYLES:
        found = [find_decayed_slices(x, outputs, style) for x in (q, k)]
        for one, rising in found[0]:
            for other, falling in found[1]:
                product = rising * falling  # (t, d / 2)
                if bool((product / product.mean() - 1).abs().max() < near):
                    return one._replace(factor=float(product.mean())), other
    return None


def find_decayed_slices(x: Tensor, outputs: Sequence[ModuleOutput], style: str) -> list[tuple[ProjectionSource, Tensor]]:
    """Return the outputs of which the pairs of x (b, h, t, d) have the norms up to ζ ** n, with these factors (t, d / 2)."""
    (_, h, _, d), near = x.shape, NEAR[x.dtype]
    found = []
    pairs = pair_columns(x.double(), style).abs()  # (b, h, t, d / 2)
    full = x.any(-1).flatten(1).all(1)  # the sequences without rows of zeros
    for one in outputs:
        y = arrange_tokens(one.output, x)
        if y is None:
            continue
        parts = pair_columns(y.unflatten(-1, (-1, d)), style).abs().transpose(1, 2)  # (b, n, t, d / 2)
        ratio = pairs[full].unsqueeze(2) / parts[full].unsqueeze(1).clamp_min(1e-30)  # (b, h, n, t, d / 2)
        if not 0 < ratio.numel() <= MOST_NUMBERS:
            continue
        steps = ratio[..., 1:, :] / ratio[..., :-1, :]
        spread = (steps / steps.mean(-2, keepdim=True) - 1).abs().amax((0, 3, 4)).nan_to_num(nan=torch.inf)  # (h, n)
        best = spread.min(-1)
        factors = ratio[:, torch.arange(h), best.indices]  # (b, h, t, d / 2)
        middle = factors.mean((0, 1))
        if bool((best.values < near).all()) and bool((factors / middle - 1).abs().max() < near):
            source = ProjectionSource(one.name, tuple(best.indices.tolist()), 1.0, x.double(), is_joined=True)
            found.append((source, middle))
    return found


def find_mixed_source(x: Tensor, outputs: Sequence[ModuleOutput], parameters: Mapping[str, Tensor]) -> ProjectionSource | None:
    """Return the output whose tokens a parameter (t, n) mixed to x (b, h, n, d), the same in all heads; None without one."""
    b, _, n, d = x.shape
    if x.dtype not in NEAR:
        return None
    for one in reversed(outputs):
        y = one.output.double()
        if y.dim() != 3 or len(y) != b or y.shape[-1] % d:
            continue
        t = y.shape[1]
        for matrix in parameters.values():
            if matrix.dim() != 2 or sorted(matrix.shape) != sorted((t, n)) or t == n:
                continue
            mixing = matrix.detach().double() if matrix.shape == (t, n) else matrix.detach().double().mT
            found = match_norms(one.name, x.double().norm(dim=-1), torch.einsum("btc,tn->bnc", y, mixing), d, NEAR[x.dtype])
            if found is not None and found.is_equal_to(x.double()):
                return found
    return None
