"""Recorder: handles the attention calls of one model and stores the q, k and rule of each in the recording."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.mechanism import attend
from regard.mechanism.masks import Given
from regard.mechanism.request import autocast_tensor, is_autocast_on
from regard.mechanism.scores import default_scale
from regard.observe.decoder_steps import has_equal_rows, match_step
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, MissedCall
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.thread_state import STATE, NextHandler, explain_error
from regard.observe.kv_history import CacheMatch, KVHistory, StoredCall, match_rows
from regard.observe.layer_numbers import LayerNumbers
from regard.observe.lazy_attentions import Attentions
from regard.observe.mask_inference import find_visible_end
from regard.observe.open_runs import OpenRun, OpenRuns, find_cache, find_token_ids, select_run
from regard.observe.recording import Call, HistoryKey, Recording, Run
from regard.observe.selection import Selection
from regard.observe.store import Store

WEIGHT_TOLERANCE = 2e-2  # tolerance to weights that a model's own code computed, perhaps in half precision
KEY_TOLERANCE = 1e-3  # relative to a key's norm: a larger difference between written and read keys means that the cache rounds
OTHERWISE = "its own attention computes something else than a softmax of q and k"
RAGGED = "its cache holds each row's keys at places of that row alone, and its steps make no one map; record row by row"
TWINS = "rows with the same keys may have changed places between its steps: maps take each of them for itself"
ENDED = (
    "sequence {} that it returned was written by a beam that ended before the last step, and is no row of the map: record a "
    "forward over it, model(sequences)"
)
ROUNDS = "its cache hands back keys that it rounded: maps hold them as they were before"


class Recorder:
    """A watcher that stores the calls of one model in a recording."""

    can_change_calls = False

    def __init__(self, modules: Mapping[str, nn.Module], chosen: Selection, store: Store) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.recording = Recording(type(modules[""]).__name__)
        self.selection, self.store = chosen, store
        self.layer_numbers = LayerNumbers()
        self.runs = OpenRuns()
        self.root = ""
        self.is_undecided = False  # whether it is not yet decided if this forward continues a run
        self.cache: Any = None  # the cache among this forward's arguments
        self.tokens: Tensor | None = None  # the token ids of this forward
        self.forwards = self.returned_at = 0
        self.weight: Tensor | None = None  # of the last call with additive scores
        self.latest: dict[tuple[str, str], tuple[int, int]] = {}  # by module and kind: forward and key address of its last step
        self.visits: dict[str, list[tuple[weakref.ref[ModuleFrame], dict[str, int]]]] = {}  # of this forward; calls by kind

    @property
    def run(self) -> Run:
        """The current run."""
        return self.runs.current.run

    def start_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward.

        A module that already ran either continues a run or begins a new one; its first attention call decides.
        """
        self.root = self.names[id(module)]
        with disable_modes():
            self.cache, self.tokens = find_cache(args, kwargs), find_token_ids(args, kwargs)
        self.visits = {}
        self.forwards += 1
        self.is_undecided = self.runs.has_root(self.root)
        if not self.is_undecided:
            self.begin_root()

    def handle_call(self, passage: AttentionCall, crossing: CallAdapter, name: str, proceed: NextHandler) -> Any:
        """Run the call unchanged and record it; return a map in place of the weights if the caller asked for weights."""
        result = proceed(passage, crossing)
        answer = None
        try:
            with disable_tracking():
                if crossing.read_weights is None or not has_different_weights(passage, crossing.read_weights(result)):
                    call = self.store_call(passage, name)
                    answer = None if crossing.replace_weights is None else Attentions(self.build_full_map(passage, call))
                else:
                    self.report_missed(MissedCall(passage.kernel, name, OTHERWISE))
        except ConfigError:  # wrong arguments of record
            raise
        except Exception as error:  # a failure here must not stop the model
            self.report_missed(MissedCall(passage.kernel, name, explain_error(error)))
        return result if crossing.replace_weights is None or answer is None else crossing.replace_weights(result, answer)

    def handle_generation(self, module: nn.Module, sequences: Tensor, prompts: int) -> None:
        """Match the sequences that a model's `generate` returned to batch rows; the run they belong to becomes the last."""
        root, since, self.returned_at = self.names[id(module)], self.returned_at, self.forwards
        recent = [one for one in self.runs if one.last > since and one.run in self.recording.runs]
        found = [(one.match_sequences(root, sequences, prompts), one.count_tokens(root), one.run) for one in recent]
        rows, _, run = max(found, key=lambda one: (len(one[0]) - one[0].count(None), one[1]), default=([], 0, self.run))
        if rows:
            run.rows = rows
            self.recording.runs.remove(run)
            self.recording.runs.append(run)
        for n in [n for n, row in enumerate(rows) if row is None]:
            self.report_missed(MissedCall("generate", root, ENDED.format(n)))

    def report_missed(self, missed: MissedCall) -> None:
        """Add a kernel that could not be recorded to `recording.missed`, once."""
        if missed not in self.recording.missed:
            self.recording.missed.append(missed)

    def build_full_map(self, passage: AttentionCall, call: Call | None) -> AttentionMap:
        """Return the map of everything the kernel was given: all heads, and the unwritten slots of a cache."""
        whole = call is not None and call.stored.stop - call.stored.first == passage.k.shape[2] + passage.unwritten_keys
        if call is not None and whole and self.selection.heads is None and self.store.dtype is None:
            return call.map
        q, k = (self.cast_for_autocast(passage, x).clone() for x in (passage.q, passage.k))
        k = F.pad(k, (0, 0, 0, passage.unwritten_keys))
        names = ("mask", "scale", "softcap", "bias", "sinks", "offset", "weight")
        return AttentionMap(q, k, **{name: getattr(passage, name) for name in names})

    def store_call(self, passage: AttentionCall, name: str) -> Call | None:
        """Record a call and return it; None if its layer is not selected."""
        kind = self.layer_numbers.infer_kind(passage, name)
        if not self.selection.has_layer(name, lambda: self.layer_numbers.assign_number(name, kind)):
            return None
        if passage.is_stepwise and kind == "cross":
            key, strand, piece = self.continue_decoder(passage, name, kind)
        else:
            key = name, kind, *self.count_visit(name, kind)
            strand, piece = self.find_history(key, passage)
        strand.stored_calls.append(piece)
        self.run.histories[key] = strand
        self.run.calls.append(Call(strand, piece))
        if self.run not in self.recording.runs:
            self.recording.runs.append(self.run)
        return self.run.calls[-1]

    def continue_decoder(self, passage: AttentionCall, name: str, kind: str) -> tuple[HistoryKey, KVHistory, StoredCall]:
        """Return the key, history and stored call of a decoder's step; the history is new if the step continues none."""
        forward, where = self.latest.get((name, kind), (-1, -1))
        fresh, self.latest[name, kind] = forward != self.forwards, (self.forwards, passage.k.data_ptr())
        first = fresh and not self.visits  # no call of this forward has decided yet
        for running in self.runs.sort_by_pointer(name, kind, passage.k.data_ptr()) if first else [self.runs.current]:
            known = running.find_histories(name, kind)
            rows = None
            if known:
                key, strand = known[-1]
                rows = match_step(
                    strand,
                    self.cast_and_select(passage, passage.q),
                    self.cast_and_select(passage, passage.k),
                    passage.parent_rows,
                )
            if rows is None or (rows.parents is not None and running is not self.runs.current):
                continue
            self.runs.switch_to(running)
            running.pointers[name, kind] = passage.k.data_ptr()
            if fresh or rows.parents is not None:
                running.roots[self.root], self.is_undecided = strand.stored_calls[-1].step + 1, False
            if rows.parents is not None:
                self.run.parent_rows[self.step] = rows.parents
            if passage.parent_rows is None and passage.k.data_ptr() != where and has_equal_rows(passage.k):
                self.report_missed(MissedCall(passage.kernel, name, TWINS))
            return key, strand, self.build_stored_call(passage, 0, strand.total, strand.total)
        if first and self.runs.current.find_histories(name, kind):
            self.begin_run()
        self.runs.current.pointers[name, kind] = passage.k.data_ptr()
        count = len(self.runs.current.find_histories(name, kind))
        return (name, kind, count, 0), *self.create_history(passage, name, kind)

    def count_visit(self, name: str, kind: str) -> tuple[int, int]:
        """Return which visit of its module in this forward a call belongs to, and its index among the calls of the visit."""
        frame = STATE.frames[-1]
        if self.names.get(id(frame.module)) != name:
            frame = next((one for one in reversed(STATE.frames) if self.names.get(id(one.module)) == name), frame)
        visits = self.visits.setdefault(name, [])
        if not visits or visits[-1][0]() is not frame:
            visits.append((weakref.ref(frame), {}))
        calls = visits[-1][1]
        calls[kind] = calls.get(kind, -1) + 1
        return len(visits) - 1, calls[kind]

    def find_history(self, key: HistoryKey, passage: AttentionCall) -> tuple[KVHistory, StoredCall]:
        """Return the history that a call continues, or a new one, and the stored call."""
        name, kind, *_ = key
        if self.is_undecided and kind == "self":
            self.decide_run(key, passage)
        strand = self.run.histories.get(key)
        place = None if strand is None else self.match_cache(strand, passage)
        if strand is None or place is None:
            if self.is_undecided and strand is not None:
                self.begin_run()
            return self.create_history(passage, name, kind)
        if place.distance > max(KEY_TOLERANCE, 4 * torch.finfo(passage.k.dtype).eps):
            self.report_missed(MissedCall(passage.kernel, name, ROUNDS))
        return self.extend_history(strand, passage, place)

    def match_cache(self, strand: KVHistory, passage: AttentionCall) -> CacheMatch | None:
        """Return where the keys of a call continue those of a history; None if they do not.

        The keys of cross attention must be the same as before. Raises UnreadableError if the rows of a cache have different
        offsets.
        """
        n, new = passage.k.shape[2], passage.q.shape[2]
        if strand.kind == "self":
            if not passage.can_use_cache or n <= new:
                return None
            if isinstance(passage.offset, Tensor) and (passage.offset != passage.offset.flatten()[0]).any():
                raise UnreadableError(RAGGED)
            return strand.match_cache(passage.k, new, lambda x: self.cast_and_select(passage, x), passage.parent_rows)
        if strand.total != n:
            return None
        if self.is_undecided and torch.equal(self.cast_and_select(passage, passage.q), strand.stored_calls[0].q):
            return None  # the first queries again: a new run
        same = match_rows(strand.get_key(n - 1), self.cast_and_select(passage, passage.k[:, :, -1:])[:, :, 0])
        return None if same is None else CacheMatch(n, 0, n, None, same.distance)

    def decide_run(self, key: HistoryKey, passage: AttentionCall) -> None:
        """Decide by its first call of self-attention whether a forward continues a run or begins a new one."""
        found = []
        for running in self.runs:
            strand = running.run.histories.get(key)
            place = None if strand is None else self.match_cache(strand, passage)
            if strand is not None and place is not None:
                found.append((running, strand, place))
                if running.has_cache(self.cache):
                    break
        chosen = select_run(found, self.cache, lambda: self.cast_and_select(passage, passage.k))
        if chosen is None:
            self.begin_run() if self.root in self.runs.current.roots else self.begin_root()
            return
        running, strand, place = chosen
        if place.known < strand.total and running.caches and self.cache is not None and not running.has_cache(self.cache):
            running = running.fork()  # its own cache may continue as well
        self.runs.switch_to(running)
        running.roots[self.root] = running.roots.get(self.root, -1) + 1
        running.add_forward(self.root, self.forwards, self.cache, self.tokens, place.known - strand.past)
        self.is_undecided = False

    def begin_run(self) -> None:
        """Begin a new run with this forward."""
        self.runs.switch_to(OpenRun())
        self.begin_root()

    def begin_root(self) -> None:
        """Make this forward the first of its module in the current run."""
        self.runs.current.roots[self.root] = 0
        self.runs.current.add_forward(self.root, self.forwards, self.cache, self.tokens)
        self.is_undecided = False

    def create_history(self, passage: AttentionCall, name: str, kind: str) -> tuple[KVHistory, StoredCall]:
        """Return a new history with the call's keys, without the unwritten slots of a cache, and the stored call."""
        k, new, seen = passage.k, passage.q.shape[2], passage.k.shape[2]
        caches = kind == "self" and passage.can_use_cache and seen > new
        if caches:
            seen = max(find_visible_end(passage.mask, new, seen, passage.offset), new)
            k = k[:, :, :seen]
        heads = None if self.selection.heads is None else tuple(head % passage.q.shape[1] for head in self.selection.heads)
        strand = KVHistory(name, kind, self.run.parent_rows, past=seen - new if caches else 0, selected_heads=heads)
        strand.keys.append(self.store.copy_tensor(self.cast_and_select(passage, k)))
        strand.steps.append(self.step)
        return strand, self.build_stored_call(passage, 0, seen, 0)

    def extend_history(self, strand: KVHistory, passage: AttentionCall, place: CacheMatch) -> tuple[KVHistory, StoredCall]:
        """Return the history with the call's new keys appended, and the stored call."""
        if strand.kind == "cross":
            return strand, self.build_stored_call(passage, place.first, place.known, place.slot)
        if place.rows is None:
            self.run.parent_rows.pop(
                self.step, None
            )  # the deepest layer decides: in the first, two histories may have equal keys
        else:
            self.run.parent_rows[self.step] = place.rows
        if place.known < strand.total:
            strand = strand.crop(place.known)
        new = passage.q.shape[2]
        strand.keys.append(
            self.store.copy_tensor(self.cast_and_select(passage, passage.k[:, :, place.slot : place.slot + new]))
        )
        strand.steps.append(self.step)
        return strand, self.build_stored_call(passage, place.first, place.known + new, place.slot)

    def build_stored_call(self, passage: AttentionCall, first: int, stop: int, slot: int) -> StoredCall:
        """Return what is stored of a call besides its keys."""
        mask = passage.mask if stop - first == passage.k.shape[2] else passage.mask.truncate(keys=stop - first)
        bias = None if passage.bias is None else passage.bias[..., : stop - first]
        sinks = passage.sinks
        if self.selection.heads is not None:
            mask = mask.select_heads(self.selection.heads)
            bias = bias if bias is None or bias.shape[1] == 1 else bias[:, self.selection.heads]
            sinks = None if sinks is None else sinks[self.selection.heads]
        return StoredCall(
            q=self.store.copy_tensor(self.cast_and_select(passage, passage.q)),
            values=self.select_values(passage, slice(slot, slot + passage.q.shape[2]) if slot else slice(stop - first)),
            first=first,
            stop=stop,
            step=self.step,
            mask=mask,
            offset=passage.offset.clone() if isinstance(passage.offset, Tensor) else passage.offset,
            scale=default_scale(passage.q) if passage.scale is None else passage.scale,
            softcap=passage.softcap,
            bias=None if bias is None else bias.detach(),
            sinks=None if sinks is None else sinks.detach().clone(),
            weight=None if passage.weight is None else self.share_weight(passage.weight.detach()),
        )

    def share_weight(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight of additive scores, shared by consecutive calls with the same weight."""
        if self.weight is None or not torch.equal(self.weight, weight):
            self.weight = weight.clone()
        return self.weight

    def select_values(self, passage: AttentionCall, new: slice) -> Tensor | None:
        """Return the values of a call's new keys; None if values are not kept."""
        if passage.v is None or not self.store.values:
            return None
        return self.store.copy_tensor(self.cast_and_select(passage, passage.v[:, :, new]))

    def cast_for_autocast(self, passage: AttentionCall, x: Tensor) -> Tensor:
        """Return queries, keys or values of a call as its kernel sees them under torch.autocast."""
        return autocast_tensor(x.detach()) if is_autocast_on(x.device) and passage.weight is None else x.detach()

    @property
    def step(self) -> int:
        """The number of the current forward in the run."""
        return self.runs.current.roots.get(self.root, 0)

    def cast_and_select(self, passage: AttentionCall, x: Tensor) -> Tensor:
        """Return queries, keys or values of a call as they are stored: of the selected heads, in the store's dtype.

        Raises ConfigError for a head that the call does not have.
        """
        x = self.cast_for_autocast(passage, x)
        if self.selection.heads is not None:
            share = passage.q.shape[1] // x.shape[1]
            count = passage.q.shape[1]
            wrong = [head for head in self.selection.heads if not -count <= head < count]
            if wrong:
                raise ConfigError(f"heads asks for {wrong[0]}, but there are {count} heads.")
            x = x[:, [head % count // share for head in self.selection.heads]]
        return x if self.store.dtype is None or not x.is_floating_point() else x.to(self.store.dtype)


def disable_tracking() -> AbstractContextManager[object]:
    """Return a context that no torch mode sees, with neither gradients nor inference mode.

    Tensors made in inference mode could not be used outside it.
    """
    return disable_autograd() if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else disable_modes()


@contextmanager
def disable_autograd() -> Iterator[None]:
    """Disable torch modes, gradients and inference mode while the context is active."""
    with disable_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def has_different_weights(passage: AttentionCall, told: Tensor | None) -> bool:
    """Return whether the weights of the model's own code differ from those of q and k.

    Only the last row of the first sequence is compared. False if there are no weights, or if the batch rows have different
    offsets.
    """
    if told is None or isinstance(passage.offset, Tensor):
        return False
    row = torch.tensor([passage.q.shape[2] - 1], device=passage.q.device)
    seen = passage.mask.block(row, torch.arange(passage.k.shape[2], device=row.device), passage.offset)[:1]
    q, k = passage.q[:1, :, -1:].detach(), passage.k[:1].detach()
    bias = None if passage.bias is None else passage.bias[:1, :, -1:].detach()
    sinks = None if passage.sinks is None else passage.sinks.detach()
    steps = attend(q, k, k, Given.from_shared_table(seen), scale=passage.scale, softcap=passage.softcap, bias=bias, sinks=sinks)
    ours, theirs = steps.weights, told.detach()[:1, :, -1:]
    return ours.shape != theirs.shape or not torch.allclose(ours, theirs.to(ours.dtype), atol=WEIGHT_TOLERANCE, rtol=0)
