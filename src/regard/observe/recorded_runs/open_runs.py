"""The open runs of a recording, and the choice of the one that a forward continues when several interleave on one model."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.recorded_runs.part_names import is_inside
from regard.observe.recorded_runs.run import HistoryKey, Run
from regard.observe.recorded_runs.token_ids import join_tokens, truncate_tokens
from regard.observe.stored_calls.cache_match import KEY_TOLERANCE, CacheMatch, has_same_keys, measure_distance
from regard.observe.stored_calls.kv_history import KVHistory

COPIED = 1e-6  # relative to a key's norm: tolerance for keys that a model computes again for each step, as by a rotation
UNNAMED = 32  # number of open runs without a cache object, the latest ones
PLAIN = (Tensor, nn.Module, str, int, float, bool, list, tuple, dict, set, type(None))


@dataclass(eq=False)
class OpenRun:
    """An open run, and what identifies the forwards that continue it."""

    run: Run = field(default_factory=Run)
    roots: dict[str, int] = field(default_factory=dict)  # by outermost module: the number of its last forward in the run
    caches: "list[weakref.ref[Any]]" = field(default_factory=list)  # arguments of its forwards
    starts: dict[str, int] = field(default_factory=dict)  # by root: number of tokens in its cache before those that are known
    pointers: dict[tuple[str, str], int] = field(default_factory=dict)  # by module and kind: address of its last keys
    last: int = 0  # the number of its last forward in the recording

    def has_cache(self, cache: Any) -> bool:
        """Return whether a cache was an argument of one of its forwards."""
        return cache is not None and any(one() is cache for one in self.caches)

    def can_continue(self) -> bool:
        """Return whether a forward may continue this run: one of its caches is still alive, or it had none."""
        return not self.caches or any(one() is not None for one in self.caches)

    def add_forward(
        self, root: str, forward: int, cache: Any, length: int | None, tokens: Tensor | None, known: int | None = None
    ) -> None:
        """Log a forward of a root module: its cache, and its tokens, appended after the first `known` (None: after all).

        `length` is the number of tokens that the cache stated to hold before.
        """
        self.last = forward
        if cache is not None and not self.has_cache(cache):
            self.caches = [one for one in self.caches if one() is not None] + [weakref.ref(cache)]
        parts = self.run.read_ids.setdefault(root, [])
        if known is not None:
            self.run.read_ids[root] = parts = list(truncate_tokens(parts, known))
        if not parts or parts[-1][1] is None:  # join_tokens begins here
            self.starts[root] = length or 0
        parts.append((self.roots[root], tokens))

    def count_tokens(self, root: str) -> int:
        """Return the number of tokens that a root module has read in this run."""
        return sum(ids.shape[1] for _, ids in self.run.read_ids.get(root, ()) if ids is not None)

    def count_read_tokens(self, root: str) -> int:
        """Return the number of tokens of its text up to the last one that a root module has read, with those of its cache."""
        return self.starts.get(root, 0) + self.count_tokens(root)

    def find_histories(self, name: str, kind: str) -> list[tuple[HistoryKey, KVHistory]]:
        """Return the keys and histories of a module for one kind of attention."""
        return [(key, history) for key, history in self.run.histories.items() if key[:2] == (name, kind)]

    def fork(self) -> "OpenRun":
        """Return a new run with the same history."""
        turns = dict(self.run.parent_rows)
        histories = {key: one.fork(turns) for key, one in self.run.histories.items()}
        implicit = {key: one.fork() for key, one in self.run.implicit_histories.items()}
        read = {root: [*parts] for root, parts in self.run.read_ids.items()}
        new = Run(histories, parent_rows=turns, implicit_histories=implicit, media=self.run.media, read_ids=read)
        new.positions = self.run.positions
        return OpenRun(new, dict(self.roots), starts=dict(self.starts), last=self.last)

    def join_tokens(self, root: str) -> Tensor | None:
        """Return the tokens (b, t) that a root module has read, after those that are unknown; None if all of them are."""
        return join_tokens(self.run.read_ids.get(root, []), self.run.parent_rows)

    def count_generated_tokens(self, root: str, sequences: Tensor) -> int:
        """Return how many tokens that a root module has read begin the one sequence that `generate` returned; else 0."""
        rows = self.join_tokens(root)
        if rows is None or len(rows) != 1 or len(sequences) != 1:
            return 0
        return max(int(same.cumprod(1).sum()) for same in self.compare_tokens(root, rows, sequences))

    def compare_tokens(self, root: str, rows: Tensor, sequences: Tensor) -> Iterator[Tensor]:
        """Yield which tokens (b, n) of the rows of a root module are those of sequences (b or 1, t).

        The sequences that `generate` returned begin with the first token in the cache, or without those that a caller left out.
        """
        for start in dict.fromkeys((0, self.starts[root])):
            n = min(rows.shape[1], sequences.shape[1] - start)
            if n > 0 or not start:
                yield rows[:, :n] == sequences[:, start : start + n].cpu()

    def count_rejected_tokens(self, root: str, sequences: Tensor) -> int:
        """Return how many of the last tokens that a root module has read are guesses that `generate` did not return.

        Only a generation of one sequence guesses, and the first token of a forward is no guess.
        """
        same, last = self.count_generated_tokens(root, sequences), self.run.read_ids.get(root, [(0, None)])[-1][1]
        rejected = self.count_tokens(root) - same
        return rejected if same and last is not None and rejected < last.shape[1] else 0

    def cut_tokens(self, root: str, count: int) -> None:
        """Remove the last `count` tokens that a root module has read, which are of its last forward."""
        step, ids = self.run.read_ids[root][-1]
        assert ids is not None
        for key, history in self.run.histories.items():
            last = history.stored_calls[-1]
            if (last.step, last.q.shape[2]) == (step, ids.shape[1]):
                is_self = history.kind == "self"
                self.run.histories[key] = history.crop(history.total - count) if is_self else history.drop_queries(count)
        for key, implicit in self.run.implicit_histories.items():
            if implicit.stored_calls[-1].step == step:
                self.run.implicit_histories[key] = implicit.crop(implicit.total - count)
        self.run.read_ids[root][-1] = step, ids[:, :-count]

    def match_sequences(self, root: str, sequences: Tensor, prompts: int) -> list[int | None]:
        """Return for each sequence (n, t) the batch row whose tokens it begins with, or None.

        Rows and sequences of one prompt are adjacent. Equal rows are each used once, if possible. The list is empty if the
        tokens are unknown.
        """
        rows, found = self.join_tokens(root), list[int | None]()
        if rows is None or prompts < 1 or len(rows) % prompts or len(sequences) % prompts:
            return []
        each = len(rows) // prompts
        for number, sequence in enumerate(sequences.split(1)):
            first = number // (len(sequences) // prompts) * each
            same = [one.all(1) for one in self.compare_tokens(root, rows[first : first + each], sequence)]
            alike = torch.stack(same).any(0).nonzero().flatten() + first
            found.append(next((row for row in alike.tolist() if row not in found), int(alike[0]) if len(alike) else None))
        return found


Candidate = tuple[OpenRun, KVHistory, CacheMatch]


class OpenRuns:
    """The open runs, and the current one."""

    def __init__(self) -> None:
        self.current = OpenRun()
        self.others: list[OpenRun] = []  # the latest last

    def __iter__(self) -> Iterator[OpenRun]:
        """Yield the current run, then the others, the latest first."""
        yield self.current
        yield from reversed(self.others)

    def switch_to(self, to: OpenRun) -> None:
        """Make an open run, or a new one, the current run."""
        if to is self.current:
            return
        waiting = [one for one in (*self.others, self.current) if one is not to and one.run.calls and one.can_continue()]
        unnamed = [one for one in waiting if not one.caches][-UNNAMED:]
        self.others = [one for one in waiting if one.caches or one in unnamed]
        self.current = to

    def sort_by_pointer(self, name: str, kind: str, pointer: int) -> list[OpenRun]:
        """Return the open runs, first those whose last keys of a module were at this address."""
        return sorted(self, key=lambda one: one.pointers.get((name, kind)) != pointer)

    def has_root(self, root: str) -> bool:
        """Return whether a root module ran in any open run."""
        return any(root in one.roots for one in self)

    def has_related_root(self, root: str) -> bool:
        """Return whether a root module, one that holds it, or one that it holds ran in any open run."""
        return any(
            not root or not other or is_inside(root, other) or is_inside(other, root) for one in self for other in one.roots
        )


def select_run(found: list[Candidate], cache: Any, keys: Callable[[], Tensor]) -> Candidate | None:
    """Return the run that a forward continues, among those whose keys end as its cache does: by its cache, else by its keys.

    A cache that a run has not had must hold all keys of the run, as a copy if the run has another. Runs that need not be cut
    come first; of equal ones, the one that waited longest.
    """
    own = [one for one in found if one[0].has_cache(cache)]
    if own:
        found = own
    elif cache is not None:
        found = [one for one in found if (one[2].distance <= COPIED or not one[0].caches) and has_near_keys(*one[1:], keys())]
    if len(found) < 2:
        return next(iter(found), None)
    ranks = [
        (place.distance, place.known < history.total, bool(one.caches) and cache is not None) for one, history, place in found
    ]
    best = [one for one, rank in zip(found, ranks, strict=True) if rank == min(ranks)]
    same = [one for one in best if len(best) == 1 or has_same_keys(one[1], one[2], keys())]
    return min(same or best, key=lambda one: one[0].last)


def has_near_keys(history: KVHistory, place: CacheMatch, k: Tensor) -> bool:
    """Return whether all keys of a cache that continue a history equal the history's, up to rounding.

    A cache that rounds the keys that were compared may round the others as well.
    """
    tolerance = max(KEY_TOLERANCE, 4 * torch.finfo(k.dtype).eps)
    return place.distance > tolerance or not measure_distance(history, place, k) > tolerance  # NaN is not


def find_cache(args: Any, kwargs: Any) -> Any:
    """Return the cache among a module's arguments, an object with an identity; None if there is none."""
    for name, value in (*(("", one) for one in args), *kwargs.items()):
        speaks = "cache" in type(value).__name__.lower() or "past" in name or "cache" in name
        if speaks and not isinstance(value, PLAIN) and type(value).__weakrefoffset__:
            return value
    return None


def read_cache_length(cache: Any, *layer: int) -> int | None:
    """Return the number of tokens that a cache states to have had, in a layer by its number; None if it states none."""
    try:
        return int(cache.get_seq_length(*layer))
    except Exception:  # of somebody else's class: transformers' own raises ValueError where no layer has keys
        return None
