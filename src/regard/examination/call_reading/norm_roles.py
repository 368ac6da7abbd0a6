"""Find queries, keys or values that the norm of another of them normalizes, while their own projection makes them."""

from torch import nn

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Finding
from regard.examination.subject.call_conventions import ROLE_NAMES, parse_qkv
from regard.examination.subject.norm_modules import is_norm

LEAVE = "Normalize queries and keys, and leave values as their projection makes them: q = q_norm(q), k = k_norm(k)."
OWN = "Normalize each by its own norm: q = q_norm(q), k = k_norm(k)."


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
            return Finding(
                "wrong roles", f"in {one.name or 'the layer'} {does}", LEAVE if own == "v" else OWN, 1.5, "norm", one.name
            )
    return None
