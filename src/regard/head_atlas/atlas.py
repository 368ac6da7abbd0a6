"""An atlas: its shards, merged."""

import math
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from regard.errors import DataError
from regard.head_atlas.documents import DocumentStore
from regard.head_atlas.plan import AtlasSettings, get_shard_path, read_plan, read_shard
from regard.head_atlas.statistics import State, describe_heads, merge_states
from regard.observe.head_table import Heads


@dataclass(frozen=True)
class Atlas:
    """An atlas: the folder it is in, its plan, the names of the layers with the numbers of their heads, and its statistics.

    documents is the number of those in the statistics: all of the plan's, unless some shards are not computed yet.
    """

    folder: Path
    plan: AtlasSettings
    layers: list[tuple[str, int]]
    state: State
    documents: int

    @property
    def heads(self) -> Heads:
        """The table of all heads."""
        plan = self.plan
        found = f"{self.documents:,} of {plan.documents:,}" if self.documents < plan.documents else f"{plan.documents:,}"
        note = (
            f"{found} document{'s' * (plan.documents != 1)} of at most {plan.tokens:,} tokens, of each {plan.queries:,} "
            "queries or fewer. Intervals: 95 %, over the documents."
        )
        rows = describe_heads(self.state, self.layers, list(plan.definitions))
        return Heads(tuple(rows), (note,), plan.definitions)


def check_examples(state: State, documents: DocumentStore) -> None:
    """Raise DataError unless the examples are queries and keys of the documents."""
    used = state["example_scores"] > -math.inf
    numbers, queries, keys = (state[f"example_{name}"][used] for name in ("documents", "queries", "keys"))
    if (numbers < len(documents)).all():
        lengths = documents.lengths[numbers]
        if (queries < lengths).all() and (keys < lengths.unsqueeze(-1)).all():
            return
    raise DataError("the shards were altered: an example is of none of the documents. Remove them and run the command again.")


def read_atlas(folder: str | Path, *, unfinished: bool = False) -> Atlas:
    """Return the atlas of a folder whose shards are all computed; if it may be unfinished, of those that are.

    Raises DataError if a shard is missing or damaged.
    """
    place = Path(folder)
    plan = read_plan(place)
    numbers = [n for n in range(plan.shards) if not unfinished or get_shard_path(place, n).exists()] or [0]
    layers, _ = read_shard(place, numbers[0], plan)

    def read_state(number: int) -> State:
        names, state = read_shard(place, number, plan)
        if names != layers:
            raise DataError(f"shard {number} is of a model with other layers than shard {numbers[0]}.")
        return state

    documents = sum(len(plan.get_documents(n)) for n in numbers)
    return Atlas(place, plan, layers, reduce(merge_states, map(read_state, numbers)), documents)
