"""Run tracker: the run, the step and the layer that an attention call belongs to, and the history that it continues."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.observe.implicit_history import ImplicitCall, ImplicitHistory, StoredRecurrence
from regard.observe.interception.attention_call import AttentionCall, MissedCall
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors
from regard.observe.interception.thread_state import STATE
from regard.observe.recorded_runs.layer_numbers import LayerNumbers
from regard.observe.recorded_runs.open_runs import OpenRun, OpenRuns, find_cache, read_cache_length, select_run
from regard.observe.recorded_runs.run import IMPLICIT, HistoryKey, Run
from regard.observe.recorded_runs.token_ids import ENCODER, find_looked_up_ids, find_side, find_token_ids
from regard.observe.stored_calls.cache_match import KEY_TOLERANCE, CacheMatch, has_hidden_keys, locate_keys, match_cache
from regard.observe.stored_calls.call_graph import OutputGraph
from regard.observe.stored_calls.decoder_steps import match_step
from regard.observe.stored_calls.kv_history import KVHistory
from regard.observe.stored_calls.mask_inference import find_visible_end
from regard.observe.stored_calls.parent_rows import has_equal_rows, match_rows
from regard.observe.stored_calls.tensor_store import Store

RAGGED = "its cache stores the keys of each row at different places, so its steps do not form one map: record row by row"
TWINS = "rows with equal keys may have been swapped between its steps; maps assume that they were not"
UNKNOWN_STATE = "it continues a state that no recorded call has left: enter record before the prompt"
RESTARTED = "its scan starts from nothing in the middle of a run; its map is that of the tokens since then"
ROUNDS = "its cache returns keys that differ from those it was given, as rounded ones do; maps use those it was given"
PRUNED = "its cache has dropped or changed keys among those it holds: a map begins at this step, a column for each key held"
Placement = tuple[HistoryKey, KVHistory | None, CacheMatch | None]  # its key; what it continues and where, None if it is new
Cast = Callable[[AttentionCall, Tensor], Tensor]  # keys or queries of a call as they are stored


class RunTracker:
    """Follows the forwards of one model. `names` are the paths of its modules by id; `report` takes what is uncertain."""

    def __init__(self, names: Mapping[int, str], cast: Cast, report: Callable[[MissedCall], None]) -> None:
        self.names, self.cast, self.report = names, cast, report
        self.layer_numbers = LayerNumbers(names)
        self.runs = OpenRuns()
        self.root = ""  # of the modules called from outside, the one that runs
        self.dropped = 0  # the number of tokens that were cut from the run's cache before this forward
        self.is_undecided = False  # whether it is not yet decided if this forward continues a run
        self.cache: Any = None  # the cache among this forward's arguments
        self.length: int | None = None  # the number of tokens that it held when this forward started, if it states it
        sides = {find_side(name.rpartition(".")[0].rpartition(".")[0]) for name in names.values()}
        self.is_pair = len(sides - {""}) == 2  # whether the model is an encoder and a decoder, of more than one module each
        self.tokens: Tensor | None = None  # the token ids of this forward
        self.looked_up: set[str] = set()  # readers whose ids were looked for among the embeddings of this forward
        self.forwards = self.returned_at = 0
        self.latest: dict[tuple[str, str], tuple[int, int]] = {}  # by module and kind: forward and key address of its last step

    @property
    def run(self) -> Run:
        """The current run."""
        return self.runs.current.run

    @property
    def step(self) -> int:
        """The number of the current forward in the run."""
        return self.runs.current.roots.get(self.root, 0)

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward.

        A module that already ran, as itself or in another one, either continues a run or begins a new one; its first attention
        call decides.
        """
        self.root = self.names[id(module)]
        with disable_modes():
            self.cache = find_cache(args, kwargs)
            self.tokens = find_token_ids(args, kwargs, self.is_pair and not find_side(self.root))
            self.length = read_cache_length(self.cache)
        self.layer_numbers.start_forward(self.root)
        self.dropped = 0
        self.looked_up = set()
        self.forwards += 1
        self.is_undecided = self.runs.has_related_root(self.root)
        if not self.is_undecided:
            self.begin_root()

    def match_sequences(self, root: str, sequences: Tensor, prompts: int, among: list[Run]) -> tuple[list[int | None], Run]:
        """Return the batch row of each sequence that `generate` returned, None if it has none, and the run they belong to.

        Guesses of the last forward that are no part of a sequence are removed. No rows if there is no such run among those of
        forwards since the last `generate`.
        """
        since, self.returned_at = self.returned_at, self.forwards
        recent = [one for one in self.runs if one.last > since and one.run in among]
        longest = max(recent, key=lambda one: (one.count_generated_tokens(root, sequences), one.last), default=None)
        rejected = 0 if longest is None else longest.count_rejected_tokens(root, sequences)
        if longest is not None and rejected and all(one.can_be_cropped for one in longest.run.implicit_histories.values()):
            longest.cut_tokens(root, rejected)
        found = [(one.match_sequences(root, sequences, prompts), one.count_read_tokens(root), one.run) for one in recent]
        rows, _, run = max(found, key=lambda one: (len(one[0]) - one[0].count(None), one[1]), default=([], 0, self.run))
        return rows, run

    def place_call(self, call: AttentionCall, name: str, kind: str) -> Placement:
        """Return where a call belongs; the current run, its steps and its parent rows are updated."""
        if call.is_stepwise and kind == "cross":
            return self.place_decoder_step(call, name, kind)
        key = name, kind, *self.count_visit(name, kind)
        if self.is_undecided and kind == "self":
            self.decide_run(key, call)
        elif self.is_undecided and not self.runs.has_root(self.root):
            self.begin_forward(key)
        history = self.run.histories.get(key)
        match = None if history is None else self.match_history(history, call, may_be_pruned=True)
        if match is not None and match.is_pruned:
            self.report(MissedCall(call.kernel, name, PRUNED))
            match = None
        if history is None or match is None:
            if self.is_undecided and history is not None:
                self.begin_run()
            return key, None, None
        if match.distance > max(KEY_TOLERANCE, 4 * torch.finfo(call.k.dtype).eps):
            self.report(MissedCall(call.kernel, name, ROUNDS))
        if kind == "self":
            self.update_parent_rows(match.rows)
        elif self.dropped:
            history = history.drop_queries(self.dropped)
        return key, history, match

    def add_looked_up_ids(self, call: AttentionCall, name: str, kind: str) -> None:
        """Add the token ids of this forward to the run from the embeddings of a call's tokens, unless they are known."""
        side = find_side(name) if self.is_pair else ""
        root = ENCODER if side == ENCODER and not find_side(self.root) else self.root
        parts = self.run.read_ids.setdefault(root, [])
        is_known = bool(parts) and parts[-1][0] == self.step and parts[-1][1] is not None
        if kind == "cross" or is_known or root in self.looked_up:
            return
        self.looked_up.add(root)
        ids = find_looked_up_ids(STATE.frames, call.q.shape[0], call.q.shape[2], side == "decoder")
        if ids is not None:
            parts[-1:] = [*(parts[-1:] if parts and parts[-1][0] != self.step else []), (self.step, ids)]

    def place_recurrence(self, call: RecurrenceCall, name: str) -> tuple[HistoryKey, ImplicitHistory | None]:
        """Return where a recurrence belongs, and the history that it continues; None if it starts from nothing.

        The current run, its steps, and the parent rows of the history are updated; those of the run too if nothing but
        recurrences is in it, since some models do not move their states with their keys. Raises UnreadableError if it
        continues a state that no recorded call has left, and is no map of its own.
        """
        initial, key = call.initial_state, (name, IMPLICIT, *self.count_visit(name, IMPLICIT))
        if self.is_undecided:
            self.decide_run_by_state(key, initial)
        history = self.run.implicit_histories.get(key)
        if history is not None and self.is_cut(self.runs.current, history):
            assert self.length is not None
            return key, history.crop(self.length)
        if initial is None:
            if history is not None:
                self.report(MissedCall(call.kernel, name, RESTARTED))
            return key, None
        match = None if history is None else history.match_state(initial)
        if history is None or match is None:
            if call.must_continue:
                raise UnreadableError(UNKNOWN_STATE)
            if self.is_undecided and history is not None:
                self.begin_run()
            return key, None
        if match.parents is not None:
            history.parent_rows[self.step] = match.parents
        if not self.run.histories:
            self.update_parent_rows(match.parents)
        return key, history

    def append_recurrence(
        self, call: RecurrenceCall, name: str, store: Store, keeps_graph: bool = False
    ) -> tuple[ImplicitCall, RecurrenceFactors]:
        """Append a recurrence to the run and to the history that it continues or begins; return it and what it computed."""
        key, history = self.place_recurrence(call, name)
        found = call.read() if history is None else call.read().select_new_values()
        graph = OutputGraph.from_result(call.result, found.outputs, found.gates) if keeps_graph else None
        history = history or ImplicitHistory(name)
        history.append_call(StoredRecurrence.copy_factors(found, store, self.step, graph))
        self.run.implicit_histories[key] = history
        recorded = ImplicitCall(history, history.stored_calls[-1])
        self.run.calls.append(recorded)
        return recorded, found

    def decide_run_by_state(self, key: HistoryKey, initial: Tensor | None) -> None:
        """Decide by its first recurrence whether a forward continues a run or begins a new one.

        A state that no recorded call has left decides nothing: self-attention may. The run that had this forward's cache is
        compared first: the states of others may be equal, as those of a short convolution over the same last tokens are.
        """
        for running in sorted(self.runs, key=lambda one: not one.has_cache(self.cache)):
            history = running.run.implicit_histories.get(key)
            if history is not None and self.is_cut(running, history):
                assert self.length is not None
                self.dropped = history.total - self.length
                self.continue_run(running, self.length)
                return
            is_same = history is not None and history.match_state(initial) is not None
            if is_same or (initial is None and running.has_cache(self.cache) and self.length):
                self.continue_run(running)
                return
        if initial is None:
            self.begin_forward(key)

    def is_cut(self, running: OpenRun, history: ImplicitHistory) -> bool:
        """Return whether a run's own cache has cut tokens of a convolution, whose state is that of the tokens that remain."""
        if not self.length or not history.can_be_cropped or not running.has_cache(self.cache):
            return False
        return history.total > self.length or (history.total == self.length and history.stored_calls[-1].state is None)

    def update_parent_rows(self, rows: Tensor | None) -> None:
        """Set each row's parent row in the previous step, None if no row moved.

        The deepest layer decides: in the first, two histories may have equal keys.
        """
        if rows is None:
            self.run.parent_rows.pop(self.step, None)
        else:
            self.run.parent_rows[self.step] = rows

    def place_decoder_step(self, call: AttentionCall, name: str, kind: str) -> Placement:
        """Return where the step of a decoder belongs."""
        forward, where = self.latest.get((name, kind), (-1, -1))
        fresh, self.latest[name, kind] = forward != self.forwards, (self.forwards, call.k.data_ptr())
        first = fresh and not self.layer_numbers.visits.calls  # no call of this forward has decided yet
        for running in self.runs.sort_by_pointer(name, kind, call.k.data_ptr()) if first else [self.runs.current]:
            known = running.find_histories(name, kind)
            rows = None
            if known:
                key, history = known[-1]
                rows = match_step(history, self.cast(call, call.q), self.cast(call, call.k), call.parent_rows)
            if rows is None or (rows.parents is not None and running is not self.runs.current):
                continue
            self.runs.switch_to(running)
            running.pointers[name, kind] = call.k.data_ptr()
            if fresh or rows.parents is not None:
                running.roots[self.root], self.is_undecided = history.stored_calls[-1].step + 1, False
            if rows.parents is not None:
                self.run.parent_rows[self.step] = rows.parents
            if call.parent_rows is None and call.k.data_ptr() != where and has_equal_rows(call.k):
                self.report(MissedCall(call.kernel, name, TWINS))
            return key, history, CacheMatch(history.total, 0, history.total, None, 0.0)
        if first and self.runs.current.find_histories(name, kind):
            self.begin_run()
        self.runs.current.pointers[name, kind] = call.k.data_ptr()
        count = len(self.runs.current.find_histories(name, kind))
        return (name, kind, count, 0), None, None

    def count_visit(self, name: str, kind: str) -> tuple[int, int]:
        """Return which visit of its module in this forward a call belongs to, and its index among the calls of the visit."""
        visits = self.layer_numbers.visits
        visit = visits.find_visit(name, self.names)
        return visit, visits.count_call(name, kind, visit)

    def match_history(self, history: KVHistory, call: AttentionCall, may_be_pruned: bool) -> CacheMatch | None:
        """Return where the keys of a call continue those of a history; None if they do not.

        A cache that may be pruned may hold any keys of the history. Those of cross attention must be the same as before.
        Raises UnreadableError if the rows of a cache have different offsets.
        """
        n, new = call.k.shape[2], call.q.shape[2]
        if history.kind == "self":
            if not call.can_use_cache or n <= new:
                return None
            if isinstance(call.offset, Tensor) and (call.offset != call.offset.flatten()[0]).any():
                raise UnreadableError(RAGGED)
            if self.length is None and n > history.total + new:  # slots: those that no query sees are unwritten, or cut off
                n = find_visible_end(call.mask, new, n, call.offset)
                if has_hidden_keys(history, call.k, new, n, lambda x: self.cast(call, x)):
                    n = history.total + new
            keys = call.k[:, :, :n]
            match = match_cache(history, keys, new, lambda x: self.cast(call, x), call.parent_rows, self.length)
            if may_be_pruned and (match is None or match.is_pruned):
                match = locate_keys(history, self.cast(call, keys[:, :, : n - new])) or match
            return match
        if history.total != n:
            return None
        if self.is_undecided and torch.equal(self.cast(call, call.q), history.stored_calls[0].q):
            return None  # the first queries again: a new run
        same = match_rows(history.get_key(n - 1), self.cast(call, call.k[:, :, -1:])[:, :, 0])
        return None if same is None else CacheMatch(n, 0, n, None, same.distance)

    def decide_run(self, key: HistoryKey, call: AttentionCall) -> None:
        """Decide by its first call of self-attention whether a forward continues a run or begins a new one."""
        found, pruned = [], False
        for running in self.runs:
            history, is_own = running.run.histories.get(key), running.has_cache(self.cache)
            may_be_pruned = is_own or (self.cache is None and running is self.runs.current)  # other texts may end alike
            match = None if history is None else self.match_history(history, call, may_be_pruned)
            if history is None or match is None:
                pruned = pruned or (history is not None and is_own and self.holds_keys(call))
                continue
            if not match.is_pruned:
                found.append((running, history, match))
            elif may_be_pruned:
                pruned = True
            if is_own:
                break
        chosen = select_run(found, self.cache, lambda: self.cast(call, call.k))
        if chosen is None:
            if pruned:
                self.report(MissedCall(call.kernel, key[0], PRUNED))
            self.begin_forward(key)
            return
        running, history, match = chosen
        if match.known < history.total and running.caches and self.cache is not None and not running.has_cache(self.cache):
            running = running.fork()  # its own cache may continue as well
        self.dropped = history.total - match.known
        self.continue_run(running, match.known - history.past)

    def holds_keys(self, call: AttentionCall) -> bool:
        """Return whether a call has keys of the cache, which stated to hold tokens when this forward started."""
        return bool(self.length) and call.can_use_cache and call.k.shape[2] > call.q.shape[2]

    def continue_run(self, running: OpenRun, known: int | None = None) -> None:
        """Make this forward the next step of a run, of which the first `known` tokens remain; all of them by default."""
        self.runs.switch_to(running)
        running.roots[self.root] = running.roots.get(self.root, -1) + 1
        running.add_forward(self.root, self.forwards, self.cache, self.length, self.tokens, known)
        self.is_undecided = False

    def begin_forward(self, key: HistoryKey) -> None:
        """Begin a new run if the current one has had this forward's module or the layer of its first call; else join it."""
        is_known = key in self.run.histories or key in self.run.implicit_histories
        self.begin_run() if is_known or self.root in self.runs.current.roots else self.begin_root()

    def begin_run(self) -> None:
        """Begin a new run with this forward."""
        self.runs.switch_to(OpenRun())
        self.begin_root()

    def begin_root(self) -> None:
        """Make this forward the first of its module in the current run."""
        self.runs.current.roots[self.root] = 0
        self.runs.current.add_forward(self.root, self.forwards, self.cache, self.length, self.tokens)
        self.is_undecided = False
