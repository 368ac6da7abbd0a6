"""Sets of keys as sorted, disjoint ranges: the parts of a row of blocks that need computing."""

from collections.abc import Iterable

from torch import Tensor

Span = tuple[int, int]
Spans = tuple[Span, ...]  # ((start, stop), ...), stop excluded


def clamp_span(start: int, stop: int, keys: int) -> Spans:
    """Return the keys from start to stop, clamped to 0 ... keys."""
    start, stop = max(start, 0), min(stop, keys)
    return ((start, stop),) if start < stop else ()


def union(a: Spans, b: Spans) -> Spans:
    """Return the keys in a or b."""
    return merge_spans(sorted(a + b))


def intersection(a: Spans, b: Spans) -> Spans:
    """Return the keys in both a and b."""
    overlaps = ((max(i, m), min(j, n)) for i, j in a for m, n in b)
    return tuple((start, stop) for start, stop in overlaps if start < stop)


def complement(a: Spans, keys: int) -> Spans:
    """Return the keys below `keys` that are not in a."""
    edges = [0, *(edge for pair in a for edge in pair), keys]
    return tuple((i, j) for i, j in zip(edges[::2], edges[1::2], strict=True) if i < j)


def is_superset(a: Spans, b: Spans) -> bool:
    """Return whether every key of b is in a."""
    return intersection(a, b) == b


def merge_spans(spans: Iterable[Span], gap: int = 0) -> Spans:
    """Merge ranges that overlap or lie at most `gap` keys apart; the spans must be sorted."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def align_spans(spans: Spans, block: int, keys: int) -> Spans:
    """Return the smallest ranges of whole blocks that contain these keys."""
    return merge_spans((start // block * block, min(-(-stop // block) * block, keys)) for start, stop in spans)


def find_true_spans(visible: Tensor) -> Spans:
    """Return the ranges in which a bool (k,) is True."""
    padded = visible.new_zeros(len(visible) + 2)
    padded[1:-1] = visible
    edges = (padded[1:] != padded[:-1]).nonzero().flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))
