"""Find queries, keys or values that come from the projection of another of them, while their own makes nothing."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import nn

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import ProjectionSource
from regard.examination.identify.mistakes import ROLE
from regard.examination.report import Finding, Unknown
from regard.examination.subject.call_conventions import parse_qkv
from regard.examination.subject.norm_modules import is_norm

MEANT = "nothing, if it is meant so, as in Reformer; a module of its own for each else, not one in a list times 3"
PAIRS = (("keys", "values"), ("queries", "keys"), ("queries", "values"))


def find_shared_source(one: InnerCall) -> Finding | None:
    """Return the finding of two roles that one part of a projection makes, while another one makes nothing; else None.

    Keys that are values by design leave nothing unused.
    """
    named = {"queries": one.q_source, "keys": one.k_source, "values": one.v_source}
    parts = {} if one.module is None else dict(one.module.named_modules(prefix=one.name))
    norms = {name for name, part in parts.items() if is_norm(part)}  # which may run for one after the other
    known = {who: source for who, source in named.items() if source is not None and not source.is_ambiguous}
    sources = {who: source for who, source in known.items() if source.name not in norms}
    for who, other in PAIRS:
        if who not in sources or other not in sources or not is_same_part(sources[who], sources[other]):
            continue
        spare = find_spare_part(one, list(known.values())) if len(known) == len(named) else ""
        if spare:
            sentence = f"{who} and {other} come from the same part of {sources[who].name}, and {spare}"
            return Finding("wrong roles", f"in {one.name or 'the layer'} {sentence}", ROLE, 1.5, "roles", one.name)
    return None


def iterate_shared_weights(module: nn.Module) -> Iterator[Unknown]:
    """Yield whether it is intended that projections of two roles have one weight, for each pair of them."""
    parts = {name: part for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, nn.Linear)}
    for (one, first), (other, second) in combinations(parts.items(), 2):
        roles = [parse_qkv(name.rpartition(".")[2]) for name in (one, other)]
        if first.weight is second.weight and roles[0] != roles[1] and all(roles):
            yield Unknown(f"whether it is intended that {one} and {other} have one weight", MEANT)


def is_same_part(one: ProjectionSource, other: ProjectionSource) -> bool:
    """Return whether two sources are the same heads of one output."""
    return one.name == other.name and set(one.slices) == set(other.slices)


def find_spare_part(one: InnerCall, sources: Sequence[ProjectionSource]) -> str:
    """Return which parts of a joint projection, or which projection of its own, nothing comes from, in words; "" if none."""
    names = {source.name for source in sources}
    count = sources[0].slice_count
    if len(names) == 1 and count:
        used = {part for source in sources for part in source.slices}
        return f"{count - len(used)} of its {count} parts make nothing" if len(used) < count else ""
    parts = {} if one.module is None else dict(one.module.named_modules(prefix=one.name))
    roles = {parse_qkv(name.rpartition(".")[2]) for name in names}
    own = [getattr(parts.get(name), "weight", None) for name in names]
    linear = [
        name for name, part in parts.items() if isinstance(part, nn.Linear) and not any(part.weight is one for one in own)
    ]
    unused = [name for name in linear if (role := parse_qkv(name.rpartition(".")[2])) in ("q", "k", "v") and role not in roles]
    return f"nothing comes from {unused[0]}" if len(unused) == 1 else ""
