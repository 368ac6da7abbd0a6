"""Check that queries, keys and values of recorded attention calls come from the projections of their names."""

from collections.abc import Sequence

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.norm_roles import find_other_norm
from regard.examination.call_reading.projection_source import ProjectionSource
from regard.examination.call_reading.repeated_bias import find_repeated_bias
from regard.examination.call_reading.shared_sources import find_shared_source
from regard.examination.identify.mistakes import ROLE
from regard.examination.report import Checked, Finding, count_calls
from regard.examination.subject.call_conventions import parse_qkv

ROLES = "queries and keys come from their own projections"


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
    sentence = f"in {one.name or 'the layer'} {parts[0]}, {parts[1]} and {parts[2]}: they are exchanged"
    return Finding("wrong roles", sentence.replace(" queries from", " queries come from", 1), ROLE, 1.5, "roles", one.name)


def read_role(source: ProjectionSource | None) -> str:
    """Return the role that the name of a source states: q, k, v or ""."""
    return "" if source is None else parse_qkv(source.name.rpartition(".")[2])
