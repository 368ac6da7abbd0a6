"""Which attention a call belongs to: self or cross, and the number of its module among those of its kind and place."""

import re
from functools import lru_cache

from regard.observe.doors.passage import Passage

PATHS = 4096  # of modules, that are remembered
CROSSES = re.compile("cross|encoder_attn|encdec|enc_attn|src_attn|multihead_attn")  # in the last two of a path's names


@lru_cache(PATHS)
def kind_told(name: str) -> str | None:
    """What the path of a module says: self, cross, or nothing."""
    path = ".".join(name.lower().rsplit(".", 2)[-2:])
    return "cross" if CROSSES.search(path) else "self" if "self" in path else None


class Counting:
    """The modules that were met, as they are met."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}  # of modules, where it was last clear
        self.places: dict[tuple[str, str], list[str]] = {}  # modules by kind and path without numbers

    def kind(self, passage: Passage, name: str) -> str:
        """self or cross: by what the door knows, by the module's path, by what its queries and keys were made from."""
        if passage.crosses is not None:
            return "cross" if passage.crosses else "self"
        told = kind_told(name)
        if told == "cross":
            return told
        if passage.apart is not None and told is None:
            self.kinds[name] = "cross" if passage.apart else "self"
        return self.kinds.get(name, "self")

    def number(self, name: str, kind: str) -> int:
        """How many modules of this kind and place were met before this one."""
        met = self.places.setdefault((kind, re.sub(r"\d+", "*", name)), [])
        if name not in met:
            met.append(name)
        return met.index(name)
