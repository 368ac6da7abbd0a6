"""The numbers of heads that running modules state, by the names that attributes of modules and configurations have."""

from typing import Any

from regard.observe.interception.thread_state import STATE

HEADS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "num_head"),
    *("query_heads", "num_query_heads", "n_query_heads"),
)
NAMES = frozenset(HEADS)


def find_head_counts(least: int = 2) -> list[int]:
    """Return the numbers of heads, at least so many, that the running modules state, of the innermost first."""
    counts = []
    for frame in reversed(STATE.frames[-3:]):
        own = vars(frame.module)
        for attributes in (own, read_attributes(own.get("config"))):
            stated = sorted(NAMES & attributes.keys(), key=HEADS.index)
            counts += [n for name in stated if type(n := attributes[name]) is int and n >= least]
    return counts


def read_attributes(config: object) -> dict[str, Any]:
    """Return the attributes of an object, without a `__getattribute__` of its own, which is slow in a configuration."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
    except AttributeError:
        return {}
    return attributes
