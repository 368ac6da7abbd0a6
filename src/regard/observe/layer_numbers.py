"""The kind of attention of a call, self or cross, and the number of its module among those of its kind and path pattern."""

import re
from functools import lru_cache

from regard.observe.interception.attention_call import AttentionCall

PATHS = 4096  # paths cached
CROSSES = re.compile("cross|encoder_attn|encdec|enc_attn|src_attn|multihead_attn")  # in the last components of a path
TORCH_CROSS = ".multihead_attn"  # cross attention in torch's decoder layers, which state it; any attention in other models
INNER = ".attention.self"  # BERT's path of the module that attends, in one of either kind


@lru_cache(PATHS)
def infer_kind_from_path(name: str) -> str | None:
    """Return the kind that a module's path states in its last two components: self, cross, or None.

    In BERT's own path the component before counts as well, and the last one does not: it is "self" in cross attention too.
    """
    path = name.lower()
    path = ".".join(path.rsplit(".", 2 + path.endswith(INNER))[-2 - path.endswith(INNER) :])
    return "cross" if CROSSES.search(path) else "self" if "self" in path.removesuffix(INNER) else None


class LayerNumbers:
    """The modules of the calls so far, with their kinds and numbers."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}  # by module: the last kind that was determined
        self.places: dict[tuple[str, str], list[str]] = {}  # modules by kind and path pattern

    def infer_kind(self, call: AttentionCall, name: str) -> str:
        """Return self or cross: as the kernel determines it, else the module's path, else the provenance of q and k."""
        if call.is_cross is not None:
            return "cross" if call.is_cross else "self"
        kind = infer_kind_from_path(name)
        if f".{name}".endswith(TORCH_CROSS) and (call.has_separate_sources is not None or name in self.kinds):
            kind = None
        if kind == "cross":
            return kind
        if call.has_separate_sources is not None and kind is None:
            self.kinds[name] = "cross" if call.has_separate_sources else "self"
        return self.kinds.get(name, "self")

    def assign_number(self, name: str, kind: str) -> int:
        """Return how many modules of this kind and path pattern came before this one; a path pattern has no numbers."""
        met = self.places.setdefault((kind, re.sub(r"\d+", "*", name)), [])
        if name not in met:
            met.append(name)
        return met.index(name)
