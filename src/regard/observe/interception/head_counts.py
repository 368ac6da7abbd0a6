"""The numbers of heads that running modules state, by the names that attributes of modules and configurations have."""

from typing import Any

from torch import nn

from regard.observe.interception.thread_state import STATE

HEADS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "num_head"),
    *("query_heads", "num_query_heads", "n_query_heads"),
)
NAMES = frozenset(HEADS)


def find_head_counts(least: int = 2) -> list[int]:
    """Return the numbers of heads, at least so many, that the running modules state, of the innermost first."""
    return [n for frame in reversed(STATE.frames[-3:]) for n in list_head_counts(frame.module) if n >= least]


def list_head_counts(module: nn.Module) -> list[int]:
    """Return the numbers of heads that a module and its configuration state."""
    own, counts = vars(module), list[int]()
    for attributes in (own, read_attributes(own["config"])) if "config" in own else (own,):
        if names := NAMES & attributes.keys():
            counts += [attributes[name] for name in sorted(names, key=HEADS.index) if type(attributes[name]) is int]
    return counts


def read_attributes(config: object) -> dict[str, Any]:
    """Return the attributes of an object, without a `__getattribute__` of its own, which is slow in a configuration."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
    except AttributeError:
        return {}
    return attributes
