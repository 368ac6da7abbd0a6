"""Check that queries, keys and values of recorded attention calls come from projections of their names, each from its own."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import Tensor, nn

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import ProjectionSource
from regard.examination.call_reading.rounding import is_near
from regard.examination.identify.affine import is_norm
from regard.examination.identify.mistakes import ROLE
from regard.examination.report import Checked, Finding, Unknown, count_calls
from regard.examination.subject.call_conventions import ROLE_NAMES, parse_qkv

ROLES = "queries and keys come from their own projections"
LEAVE = "Normalize queries and keys, and leave values as their projection makes them: q = q_norm(q), k = k_norm(k)."
OWN = "Normalize each by its own norm: q = q_norm(q), k = k_norm(k)."
REPEATED = "The projection adds its bias itself: leave out the second one."
MEANT = "nothing, if it is meant so, as in Reformer; a module of its own for each else, not one in a list times 3"
PAIRS = (("keys", "values"), ("queries", "keys"), ("queries", "values"))


def check_roles(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that queries and keys come from the projections of their names; None if names do not tell."""
    for find_mistake in (find_exchanged_values, find_other_norm, find_shared_source, find_repeated_bias):
        wrong = next((found for one in calls if (found := find_mistake(one)) is not None), None)
        if wrong is not None:
            return wrong
    named = [(one, read_role(one.q_source), read_role(one.k_source)) for one in calls]
    if not named or any((q, k) not in (("q", "k"), ("k", "q")) for _, q, k in named):
        return None
    for one, q, _ in named:
        if q == "k":
            assert one.q_source is not None
            assert one.k_source is not None
            sentence = f"queries come from {one.q_source.name}, and keys from {one.k_source.name}: they are exchanged"
            return Finding("wrong roles", sentence, ROLE, 1.5, "roles", one.name)
    return Checked(ROLES, f"in {count_calls(calls)}, by their names and norms")


def find_exchanged_values(one: InnerCall) -> Finding | None:
    """Return the finding of values and of queries or keys that come from the projections of one another, by their names."""
    sources = {"queries": one.q_source, "keys": one.k_source, "values": one.v_source}
    roles = [read_role(source) for source in sources.values()]
    if sorted(roles) != ["k", "q", "v"] or roles[2] == "v":
        return None
    parts = [f"{who} from {source.name}" for who, source in sources.items() if source is not None]
    sentence = f"{parts[0]}, {parts[1]} and {parts[2]}: they are exchanged"
    return one.report("wrong roles", sentence.replace("queries from", "queries come from", 1), ROLE, 1.5, "roles")


def read_role(source: ProjectionSource | None) -> str:
    """Return the role that the name of a source states: q, k, v or ""."""
    return "" if source is None else parse_qkv(source.name.rpartition(".")[2])


def find_other_norm(one: InnerCall) -> Finding | None:
    """Return the finding of a norm whose name states another role than what it normalizes; None without one.

    Values need a projection of their own, and queries and keys a norm of their own: shared ones may be meant.
    """
    parts = {} if one.module is None else dict(one.module.named_modules(prefix=one.name))
    held = {(parse_qkv(name.rpartition(".")[2]), isinstance(part, nn.Linear), is_norm(part)) for name, part in parts.items()}
    for own, source in (("q", one.q_source), ("k", one.k_source), ("v", one.v_source)):
        name = "" if source is None else source.name
        role = parse_qkv(name.rpartition(".")[2])
        if source is None or source.is_ambiguous or name not in parts or not is_norm(parts[name]) or role in ("", own):
            continue
        if (own, own == "v", own != "v") in held:
            does = f"{ROLE_NAMES[own]} are normalized by {name}, the norm of the {ROLE_NAMES[role]}"
            return one.report("wrong roles", does, LEAVE if own == "v" else OWN, 1.5, "norm")
    return None


def find_repeated_bias(one: InnerCall) -> Finding | None:
    """Return the finding of a bias that is added once more than its projection does; None without one."""
    parts = {} if one.module is None else dict(one.module.named_modules(prefix=one.name))
    sides = {"q": (one.call.q, one.q_named), "k": (one.call.k, one.k_named), "v": (one.call.v, one.v_named)}
    for name, part in parts.items():
        x, named = sides.get(parse_qkv(name.rpartition(".")[2]), (None, None))
        bias = part.bias if isinstance(part, nn.Linear) else None
        if bias is not None and x is not None and named is not None and is_added(bias, named, x):
            return one.report("wrong output", f"the bias of {name} is added twice", REPEATED, 1.4, "bias")
    return None


def is_added(bias: Tensor, named: Tensor, x: Tensor) -> bool:
    """Return whether x (b, h, t, d) is a projection's output `named` plus its bias (h d,), which is not 0."""
    if named.shape != x.shape or bias.numel() != x.shape[1] * x.shape[3] or not bool(bias.any()):
        return False
    own = bias.detach().double().view(x.shape[1], 1, x.shape[3])
    return is_near(x.double() - named, own.expand_as(named))


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
            return one.report("wrong roles", sentence, ROLE, 1.5, "roles")
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
