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
from regard.mechanism.request import autocast, autocasts
from regard.mechanism.scores import default_scale
from regard.observe.chosen import Chosen
from regard.observe.counting import Counting
from regard.observe.doors.lineage import Frame
from regard.observe.doors.passage import Crossing, Missed, Passage
from regard.observe.doors.plain import UnreadableError, unseen
from regard.observe.doors.scene import SCENE, Proceed, why
from regard.observe.recording import Call, Key, Recording, Run
from regard.observe.returned import Attentions
from regard.observe.rules import first_keys, last_seen, some_heads
from regard.observe.runs import Running, Runs, choose, find_cache, find_tokens
from regard.observe.stepwise import alike, continued
from regard.observe.store import Store
from regard.observe.strand import Piece, Place, Strand, same_rows

ALIKE = 2e-2  # tolerance to weights that a model's own code computed, perhaps in half precision
ROUNDED = 1e-3  # relative to a key's norm: a larger difference between written and read keys means that the cache rounds
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

    changes = False

    def __init__(self, modules: Mapping[str, nn.Module], chosen: Chosen, store: Store) -> None:
        self.names = {id(module): name for name, module in modules.items()}
        self.recording = Recording(type(modules[""]).__name__)
        self.chosen, self.store = chosen, store
        self.counting = Counting()
        self.runs = Runs()
        self.root = ""
        self.undecided = False  # whether it is not yet decided if this forward continues a run
        self.cache: Any = None  # the cache among this forward's arguments
        self.tokens: Tensor | None = None  # the token ids of this forward
        self.forwards = self.returned_at = 0
        self.weight: Tensor | None = None  # of the last call with additive scores
        self.latest: dict[tuple[str, str], tuple[int, int]] = {}  # by module and kind: forward and key address of its last step
        self.visits: dict[str, list[tuple[weakref.ref[Frame], dict[str, int]]]] = {}  # of this forward; calls by kind

    @property
    def run(self) -> Run:
        """The current run."""
        return self.runs.current.run

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start a forward.

        A module that already ran either continues a run or begins a new one; its first attention call decides.
        """
        self.root = self.names[id(module)]
        with unseen():
            self.cache, self.tokens = find_cache(args, kwargs), find_tokens(args, kwargs)
        self.visits = {}
        self.forwards += 1
        self.undecided = self.runs.ran(self.root)
        if not self.undecided:
            self.begin_root()

    def meet(self, passage: Passage, crossing: Crossing, name: str, proceed: Proceed) -> Any:
        """Run the call unchanged and record it; return a map in place of the weights if the caller asked for weights."""
        result = proceed(passage, crossing)
        answer = None
        try:
            with looking():
                if crossing.told is None or not unlike(passage, crossing.told(result)):
                    call = self.keep(passage, name)
                    answer = None if crossing.answer is None else Attentions(self.handed(passage, call))
                else:
                    self.miss(Missed(passage.door, name, OTHERWISE))
        except ConfigError:  # wrong arguments of record
            raise
        except Exception as error:  # a failure here must not stop the model
            self.miss(Missed(passage.door, name, why(error)))
        return result if crossing.answer is None or answer is None else crossing.answer(result, answer)

    def returned(self, module: nn.Module, sequences: Tensor, prompts: int) -> None:
        """Match the sequences that a model's `generate` returned to batch rows; the run they belong to becomes the last."""
        root, since, self.returned_at = self.names[id(module)], self.returned_at, self.forwards
        recent = [one for one in self.runs if one.last > since and one.run in self.recording.runs]
        found = [(one.rows_of(root, sequences, prompts), one.count_tokens(root), one.run) for one in recent]
        rows, _, run = max(found, key=lambda one: (len(one[0]) - one[0].count(None), one[1]), default=([], 0, self.run))
        if rows:
            run.rows = rows
            self.recording.runs.remove(run)
            self.recording.runs.append(run)
        for n in [n for n, row in enumerate(rows) if row is None]:
            self.miss(Missed("generate", root, ENDED.format(n)))

    def miss(self, missed: Missed) -> None:
        """Add a kernel that could not be recorded to `recording.missed`, once."""
        if missed not in self.recording.missed:
            self.recording.missed.append(missed)

    def handed(self, passage: Passage, call: Call | None) -> AttentionMap:
        """Return the map of everything the kernel was given: all heads, and the unwritten slots of a cache."""
        whole = call is not None and call.piece.stop - call.piece.first == passage.k.shape[2] + passage.room
        if call is not None and whole and self.chosen.heads is None and self.store.dtype is None:
            return call.map
        q, k = (self.rounded(passage, x).clone() for x in (passage.q, passage.k))
        k = F.pad(k, (0, 0, 0, passage.room))
        names = ("mask", "scale", "softcap", "bias", "sinks", "offset", "weight")
        return AttentionMap(q, k, **{name: getattr(passage, name) for name in names})

    def keep(self, passage: Passage, name: str) -> Call | None:
        """Record a call and return it; None if its layer is not selected."""
        kind = self.counting.kind(passage, name)
        if not self.chosen.layer(name, lambda: self.counting.number(name, kind)):
            return None
        if passage.stepwise and kind == "cross":
            key, strand, piece = self.stepped(passage, name, kind)
        else:
            key = name, kind, *self.counted(name, kind)
            strand, piece = self.strand(key, passage)
        strand.pieces.append(piece)
        self.run.strands[key] = strand
        self.run.calls.append(Call(strand, piece))
        if self.run not in self.recording.runs:
            self.recording.runs.append(self.run)
        return self.run.calls[-1]

    def stepped(self, passage: Passage, name: str, kind: str) -> tuple[Key, Strand, Piece]:
        """Return the key, history and stored call of a decoder's step; the history is new if the step continues none."""
        forward, where = self.latest.get((name, kind), (-1, -1))
        fresh, self.latest[name, kind] = forward != self.forwards, (self.forwards, passage.k.data_ptr())
        first = fresh and not self.visits  # no call of this forward has decided yet
        for running in self.runs.by_pointer(name, kind, passage.k.data_ptr()) if first else [self.runs.current]:
            known = running.steps_of(name, kind)
            rows = None
            if known:
                key, strand = known[-1]
                rows = continued(strand, self.kept(passage, passage.q), self.kept(passage, passage.k), passage.turned)
            if rows is None or (rows.moved is not None and running is not self.runs.current):
                continue
            self.runs.switch(running)
            running.pointers[name, kind] = passage.k.data_ptr()
            if fresh or rows.moved is not None:
                running.roots[self.root], self.undecided = strand.pieces[-1].step + 1, False
            if rows.moved is not None:
                self.run.turns[self.step] = rows.moved
            if passage.turned is None and passage.k.data_ptr() != where and alike(passage.k):
                self.miss(Missed(passage.door, name, TWINS))
            return key, strand, self.piece(passage, 0, strand.total, strand.total)
        if first and self.runs.current.steps_of(name, kind):
            self.begin_run()
        self.runs.current.pointers[name, kind] = passage.k.data_ptr()
        count = len(self.runs.current.steps_of(name, kind))
        return (name, kind, count, 0), *self.begun(passage, name, kind)

    def counted(self, name: str, kind: str) -> tuple[int, int]:
        """Return which visit of its module in this forward a call belongs to, and its index among the calls of the visit."""
        frame = SCENE.frames[-1]
        if self.names.get(id(frame.module)) != name:
            frame = next((one for one in reversed(SCENE.frames) if self.names.get(id(one.module)) == name), frame)
        visits = self.visits.setdefault(name, [])
        if not visits or visits[-1][0]() is not frame:
            visits.append((weakref.ref(frame), {}))
        calls = visits[-1][1]
        calls[kind] = calls.get(kind, -1) + 1
        return len(visits) - 1, calls[kind]

    def strand(self, key: Key, passage: Passage) -> tuple[Strand, Piece]:
        """Return the history that a call continues, or a new one, and the stored call."""
        name, kind, *_ = key
        if self.undecided and kind == "self":
            self.decide(key, passage)
        strand = self.run.strands.get(key)
        place = None if strand is None else self.place(strand, passage)
        if strand is None or place is None:
            if self.undecided and strand is not None:
                self.begin_run()
            return self.begun(passage, name, kind)
        if place.apart > max(ROUNDED, 4 * torch.finfo(passage.k.dtype).eps):
            self.miss(Missed(passage.door, name, ROUNDS))
        return self.continued(strand, passage, place)

    def place(self, strand: Strand, passage: Passage) -> Place | None:
        """Return where the keys of a call continue those of a history; None if they do not.

        The keys of cross attention must be the same as before. Raises UnreadableError if the rows of a cache have different
        offsets.
        """
        n, new = passage.k.shape[2], passage.q.shape[2]
        if strand.kind == "self":
            if not passage.caches or n <= new:
                return None
            if isinstance(passage.offset, Tensor) and (passage.offset != passage.offset.flatten()[0]).any():
                raise UnreadableError(RAGGED)
            return strand.found(passage.k, new, lambda x: self.kept(passage, x), passage.turned)
        if strand.total != n:
            return None
        if self.undecided and torch.equal(self.kept(passage, passage.q), strand.pieces[0].q):
            return None  # the first queries again: a new run
        same = same_rows(strand.key(n - 1), self.kept(passage, passage.k[:, :, -1:])[:, :, 0])
        return None if same is None else Place(n, 0, n, None, same.apart)

    def decide(self, key: Key, passage: Passage) -> None:
        """Decide by its first call of self-attention whether a forward continues a run or begins a new one."""
        found = []
        for running in self.runs:
            strand = running.run.strands.get(key)
            place = None if strand is None else self.place(strand, passage)
            if strand is not None and place is not None:
                found.append((running, strand, place))
                if running.has_cache(self.cache):
                    break
        chosen = choose(found, self.cache, lambda: self.kept(passage, passage.k))
        if chosen is None:
            self.begin_run() if self.root in self.runs.current.roots else self.begin_root()
            return
        running, strand, place = chosen
        if place.known < strand.total and running.caches and self.cache is not None and not running.has_cache(self.cache):
            running = running.fork()  # its own cache may continue as well
        self.runs.switch(running)
        running.roots[self.root] = running.roots.get(self.root, -1) + 1
        running.advance(self.root, self.forwards, self.cache, self.tokens, place.known - strand.past)
        self.undecided = False

    def begin_run(self) -> None:
        """Begin a new run with this forward."""
        self.runs.switch(Running())
        self.begin_root()

    def begin_root(self) -> None:
        """Make this forward the first of its module in the current run."""
        self.runs.current.roots[self.root] = 0
        self.runs.current.advance(self.root, self.forwards, self.cache, self.tokens)
        self.undecided = False

    def begun(self, passage: Passage, name: str, kind: str) -> tuple[Strand, Piece]:
        """Return a new history with the call's keys, without the unwritten slots of a cache, and the stored call."""
        k, new, seen = passage.k, passage.q.shape[2], passage.k.shape[2]
        caches = kind == "self" and passage.caches and seen > new
        if caches:
            seen = max(last_seen(passage.mask, new, seen, passage.offset), new)
            k = k[:, :, :seen]
        heads = None if self.chosen.heads is None else tuple(head % passage.q.shape[1] for head in self.chosen.heads)
        strand = Strand(name, kind, self.run.turns, past=seen - new if caches else 0, chosen=heads)
        strand.keys.append(self.store.kept(self.kept(passage, k)))
        strand.steps.append(self.step)
        return strand, self.piece(passage, 0, seen, 0)

    def continued(self, strand: Strand, passage: Passage, place: Place) -> tuple[Strand, Piece]:
        """Return the history with the call's new keys appended, and the stored call."""
        if strand.kind == "cross":
            return strand, self.piece(passage, place.first, place.known, place.slot)
        if place.rows is None:
            self.run.turns.pop(self.step, None)  # the deepest layer decides: in the first, two histories may have equal keys
        else:
            self.run.turns[self.step] = place.rows
        if place.known < strand.total:
            strand = strand.cropped(place.known)
        new = passage.q.shape[2]
        strand.keys.append(self.store.kept(self.kept(passage, passage.k[:, :, place.slot : place.slot + new])))
        strand.steps.append(self.step)
        return strand, self.piece(passage, place.first, place.known + new, place.slot)

    def piece(self, passage: Passage, first: int, stop: int, slot: int) -> Piece:
        """Return what is stored of a call besides its keys."""
        mask = passage.mask if stop - first == passage.k.shape[2] else first_keys(passage.mask, stop - first)
        bias = None if passage.bias is None else passage.bias[..., : stop - first]
        sinks = passage.sinks
        if self.chosen.heads is not None:
            mask = some_heads(mask, self.chosen.heads)
            bias = bias if bias is None or bias.shape[1] == 1 else bias[:, self.chosen.heads]
            sinks = None if sinks is None else sinks[self.chosen.heads]
        return Piece(
            q=self.store.kept(self.kept(passage, passage.q)),
            values=self.values(passage, slice(slot, slot + passage.q.shape[2]) if slot else slice(stop - first)),
            first=first,
            stop=stop,
            step=self.step,
            mask=mask,
            offset=passage.offset.clone() if isinstance(passage.offset, Tensor) else passage.offset,
            scale=default_scale(passage.q) if passage.scale is None else passage.scale,
            softcap=passage.softcap,
            bias=None if bias is None else bias.detach(),
            sinks=None if sinks is None else sinks.detach().clone(),
            weight=None if passage.weight is None else self.shared(passage.weight.detach()),
        )

    def shared(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight of additive scores, shared by consecutive calls with the same weight."""
        if self.weight is None or not torch.equal(self.weight, weight):
            self.weight = weight.clone()
        return self.weight

    def values(self, passage: Passage, new: slice) -> Tensor | None:
        """Return the values of a call's new keys; None if values are not kept."""
        if passage.v is None or not self.store.values:
            return None
        return self.store.kept(self.kept(passage, passage.v[:, :, new]))

    def rounded(self, passage: Passage, x: Tensor) -> Tensor:
        """Return queries, keys or values of a call as its kernel sees them under torch.autocast."""
        return autocast(x.detach()) if autocasts(x.device) and passage.weight is None else x.detach()

    @property
    def step(self) -> int:
        """The number of the current forward in the run."""
        return self.runs.current.roots.get(self.root, 0)

    def kept(self, passage: Passage, x: Tensor) -> Tensor:
        """Return queries, keys or values of a call as they are stored: of the selected heads, in the store's dtype.

        Raises ConfigError for a head that the call does not have.
        """
        x = self.rounded(passage, x)
        if self.chosen.heads is not None:
            share = passage.q.shape[1] // x.shape[1]
            count = passage.q.shape[1]
            wrong = [head for head in self.chosen.heads if not -count <= head < count]
            if wrong:
                raise ConfigError(f"heads asks for {wrong[0]}, but there are {count} heads.")
            x = x[:, [head % count // share for head in self.chosen.heads]]
        return x if self.store.dtype is None or not x.is_floating_point() else x.to(self.store.dtype)


def looking() -> AbstractContextManager[object]:
    """Return a context that no torch mode sees, with neither gradients nor inference mode.

    Tensors made in inference mode could not be used outside it.
    """
    return plainly() if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else unseen()


@contextmanager
def plainly() -> Iterator[None]:
    """Disable torch modes, gradients and inference mode while the context is active."""
    with unseen(), torch.inference_mode(False), torch.no_grad():
        yield


def unlike(passage: Passage, told: Tensor | None) -> bool:
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
    steps = attend(q, k, k, Given.sharing(seen), scale=passage.scale, softcap=passage.softcap, bias=bias, sinks=sinks)
    ours, theirs = steps.weights, told.detach()[:1, :, -1:]
    return ours.shape != theirs.shape or not torch.allclose(ours, theirs.to(ours.dtype), atol=ALIKE, rtol=0)
