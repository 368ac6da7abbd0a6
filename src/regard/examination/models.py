"""A whole model, token ids in: each layer's attention as it was recorded, and what moves what from end to end."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, RegardError
from regard.examination import evidence, reach
from regard.examination.report import Checked, Finding, Report, Sight, Unknown
from regard.examination.rules import later
from regard.examination.subjects import answered, name_of, uncompiled
from regard.examination.untouched import random_states
from regard.mechanism import Mask
from regard.mechanism.rule import Offset
from regard.observe import record

TOKENS, FEWER, BATCH = 8, (6, 4, 3, 2), 2
FORWARDS = TOKENS + 6  # about as many as an examination takes, for a bar
HIDE = "Hide what the rule hides in that layer, before its softmax: scores.masked_fill(~mask, -torch.inf), or is_causal=True."
SHOW = "Hide no more than the rule does: in that layer give only the keys that may not be seen the score -inf."
MIX = "Keep tokens and sequences apart in that module: norms over the last axis alone, no mean, view or shift over tokens."
DRAW = "Draw in training only: nn.Dropout, or F.dropout(x, p, training=self.training)."


def is_model(subject: object, sample: Any = None) -> bool:
    """Whether a subject is a whole model: a module that takes token ids, as its sample is or as it is tried."""
    plain = uncompiled(subject)
    if not isinstance(plain, nn.Module):
        return False
    if sample is not None:
        return isinstance(sample, Tensor) and not sample.is_floating_point()
    with evaluating(plain):
        return fitting(plain) is not None


def examine_model(
    subject: object, *, expects: Mask, sample: Any = None, scale: float | None = None, offset: Offset = 0
) -> Report:
    """Who sees whom in each layer and from end to end, of a model in evaluation. Raises ConfigError where it cannot be called.

    What is found in a layer's recorded attention is laid at that layer's door; what moves beside attention, at the door of
    the first module that moves where what it was given does not. The scale of a layer is a question to the layer alone.
    """
    model: Any = uncompiled(subject)
    with evaluating(model):
        ids = given(sample) if sample is not None else fitting(model)
        if ids is None or len(ids) < 1:
            raise ConfigError(f"no token ids were found that {name_of(model)} takes. Pass sample=, ids (b, t).")
        said = list(Examined(model, ids, first(expects, ids.shape[1], offset)).said())
        said_findings = tuple(one for one in said if isinstance(one, Finding))
        checked = tuple(one for one in said if isinstance(one, Checked))
        unknown = tuple(one for one in said if isinstance(one, Unknown))
        sights = [one for one in said if isinstance(one, Sight)]
    note = f"token ids {tuple(ids.shape)}, {sum(p.numel() for p in model.parameters()):,} parameters"
    return Report(name_of(model), str(expects), said_findings, checked, unknown, (note,), sights[0] if sights else None)


def first(expects: Mask, t: int, offset: Offset) -> Tensor:
    """Who may see whom in the first sequence, (t, t): in any head."""
    table = expects.table(t, t, offset)
    return table[(None,) * (4 - table.dim())][0].any(0).expand(t, t)


class Seen(NamedTuple):
    """A layer's recorded attention: its name, and the largest weight of any head in the first sequence, (q, k)."""

    name: str
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Examined:
    """A model, ids (b, t) that it takes, and who may see whom in each layer of the first sequence, bool (t, t)."""

    model: nn.Module
    ids: Tensor
    allowed: Tensor

    def said(self) -> Iterator[Finding | Checked | Unknown | Sight]:
        """What is found of layers and of the whole; the picture of the whole last."""
        outputs = run(self.model, self.ids)
        if not outputs.isfinite().all():
            row = int((~outputs.isfinite().all(-1)).any(0).int().argmax())
            yield Finding("blind row", f"output {row} of the model is not finite", SHOW, cause="blind")
            return
        drawn = float((run(self.model, self.ids) - outputs).abs().max())
        if drawn > noise(self.model, outputs):
            told = f"two calls in evaluation with the same tokens differ by {drawn:.2g}"
            yield Finding("dropout in evaluation", told, DRAW, 3.0, "dropout")
            return
        layers, missed = self.layers()
        moved, across = self.moved(outputs)
        yield from self.of_layers(layers, missed, moved)
        yield from self.of_whole(layers, moved, across, noise(self.model, outputs))

    def layers(self) -> tuple[list[Seen], list[str]]:
        """The recorded attention of each layer, and what was not recorded."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with record(self.model) as recording:
                run(self.model, self.ids)
        missed = [f"{one.module}: {one.reason}" for one in recording.missed]
        seen = []
        try:
            names = recording.layers()
        except RegardError as error:
            return [], missed or [str(error)]
        for number, name in enumerate(names):
            try:
                weights = recording.map(number).dense()
            except RegardError as error:
                missed.append(f"{name}: {error}")
                continue
            if weights.shape[2:] == self.allowed.shape:
                seen.append(Seen(name, weights[0].amax(0).double().cpu()))
            else:
                missed.append(f"{name}: it has {weights.shape[3]} keys for {weights.shape[2]} queries")
        return seen, missed

    def moved(self, outputs: Tensor) -> tuple[Tensor, float]:
        """How far each output of the first sequence moves with each of its tokens, (q, k), and any of the others' at most."""
        moved, across = torch.zeros(self.allowed.shape, dtype=torch.float64), 0.0
        for j in range(self.ids.shape[1]):
            change = (run(self.model, self.changed(j)) - outputs).abs().amax(-1)  # (b, t)
            moved[:, j] = change[0]
            across = max(across, float(change[1:].max()) if len(change) > 1 else 0.0)
        return moved, across

    def changed(self, j: int) -> Tensor:
        """The ids with token j of the first sequence replaced by another of them."""
        others = self.ids[self.ids != self.ids[0, j]]
        ids = self.ids.clone()
        ids[0, j] = others[0] if len(others) else self.ids[0, j] - 1
        return ids

    def of_layers(self, layers: list[Seen], missed: list[str], moved: Tensor) -> Iterator[Finding | Checked | Unknown]:
        """Layers that see more than they may, or less without a window."""
        more = [one for one in layers if ((one.weights > 0) & ~self.allowed).any()]
        less = [one for one in layers if one not in more and not self.near(one.weights > 0)]
        if more:
            extra = (more[0].weights > 0) & ~self.allowed
            i, j = (int(n) for n in extra.nonzero()[0])
            ahead = bool(later(*self.allowed.shape)[i, j])
            told = f"{more[0].name}: row {i} puts {float(more[0].weights[i, j]):.2g} on token {j}, which "
            told += "comes later" if ahead else "it may not see"
            told += f"; changing token {j} moves output {i} of the model by {float(moved[i, j]):.2g}{beside(more)}"
            yield Finding("future leak" if ahead else "wrong mask", told, HIDE, 2.0, "mask")
        if less:
            hidden = self.allowed & ~(less[0].weights > 0)
            i, j = (int(n) for n in hidden.nonzero()[0])
            told = f"{less[0].name}: row {i} may see token {j}, and puts no weight on it{beside(less)}"
            yield Finding("wrong mask", told, SHOW, 1.8, "mask")
        if layers and not more and not less:
            near = [one.name for one in layers if not torch.equal(one.weights > 0, self.allowed)]
            window = f"; of these {len(near)} see only tokens that are near, as with a window" if near else ""
            yield Checked("no layer sees what it may not", f"the recorded weights of {len(layers)} layers{window}")
        if missed or not layers:
            what = "; ".join(missed[:2]) or "no attention of it was recorded"
            yield Unknown(f"who sees whom in every layer ({what})", "the layers one by one: examine(model.layer)")

    def near(self, seen: Tensor) -> bool:
        """Whether each query sees all that it may, or of that what is near: a window, or the last tokens without a gap."""
        place = torch.arange(len(seen))
        back = place[:, None] - place
        if not seen.any():
            return False
        window = (back <= int(back[seen].max())) & (back >= int(back[seen].min()))
        if torch.equal(seen, self.allowed & window):
            return bool((seen & (back < 0)).any()) or not (self.allowed & (back < 0)).any()  # a causal layer is no window
        last = torch.where(self.allowed & ~seen, place, -1).amax(-1, keepdim=True)  # the last key that is left out
        return torch.equal(seen, self.allowed & (place > last)) and bool((last[:, 0] < place).all())

    def of_whole(self, layers: list[Seen], moved: Tensor, across: float, least: float) -> Iterator[Finding | Checked | Sight]:
        """What moves from end to end and may not."""
        meets = closure(self.allowed, max(len(layers), 1))
        leaking = (moved > least) & ~meets
        if across > least:
            yield Finding(
                "batch leak", f"changing a token of sequence 0 moves outputs of another by {across:.2g}", MIX, 1.2, "batch"
            )
        if leaking.any() and not any(((one.weights > 0) & ~self.allowed).any() for one in layers):
            j = int(leaking.any(0).nonzero()[-1])
            i = int(leaking[:, j].int().argmax())
            where = door(self.model, self.ids, self.changed(j), i)
            told = f"changing token {j} moves output {i} of the model by {float(moved[i, j]):.2g}"
            told += f"; the first module that moves there is {where}" if where else ""
            yield Finding("future leak" if j > i else "wrong mask", told, MIX, 1.5, "mask")
        if not leaking.any() and across <= least:
            yield Checked(
                "from end to end no output moves with what it may not see", f"a change of {least:.0e} would have shown"
            )
        words = evidence.SENTENCE if len(moved) == len(evidence.SENTENCE) else tuple(str(n) for n in range(len(moved)))
        yield Sight(meets, moved > least, moved / moved.amax(-1, keepdim=True).clamp_min(least), words)


def beside(layers: Sequence[Seen]) -> str:
    """`; so in 3 more layers`."""
    more = len({one.name for one in layers}) - 1
    return f"; so in {more} more layer{'s' * (more > 1)}" if more else ""


def closure(allowed: Tensor, layers: int) -> Tensor:
    """Who may meet whom through several layers, each of which passes on a token's own vector too."""
    step = allowed | torch.eye(len(allowed), dtype=torch.bool)
    meets = step
    for _ in range(min(layers, len(allowed)) - 1):
        meets = (meets.double() @ step.double()) > 0
    return meets


def door(model: nn.Module, ids: Tensor, changed: Tensor, i: int) -> str:
    """The first and innermost module whose output at place i moves where nothing that it was given moves; "" if none."""
    before, after = outcomes(model, ids, i), outcomes(model, changed, i)
    for (name, came, gave), (_, came_then, gave_then) in zip(before, after, strict=False):
        if same(came, came_then) and not same(gave, gave_then):
            return name
    return ""


Outcome = tuple[str, list[Tensor], list[Tensor]]


def outcomes(model: nn.Module, ids: Tensor, i: int) -> list[Outcome]:
    """What each module was given and gave at place i of the first sequence, in the order in which they end."""
    found: list[Outcome] = []

    def keep(name: str, t: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, named: dict[str, Any], output: Any) -> None:
            found.append((name, placed([*inputs, *named.values()], t, i), placed([output], t, i)))

        return hook

    hooks = [
        part.register_forward_hook(keep(name, ids.shape[1]), with_kwargs=True) for name, part in model.named_modules() if name
    ]
    try:
        run(model, ids)
    finally:
        for one in hooks:
            one.remove()
    return found


def placed(values: Sequence[Any], t: int, i: int) -> list[Tensor]:
    """Place i of every tensor (b, t, ...) among values, of the first sequence."""
    flat = [one for value in values for one in (value if isinstance(value, (tuple, list)) else [value])]
    return [one[0, i].detach().clone() for one in flat if isinstance(one, Tensor) and one.dim() >= 2 and one.shape[1] == t]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether tensors are equal, beside rounding."""
    return len(one) == len(other) and all(
        torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7) for a, b in zip(one, other, strict=True)
    )


def run(model: nn.Module, ids: Tensor) -> Tensor:
    """The outputs (b, t, n) in float64."""
    with torch.no_grad():
        return answered(model(ids), ids.shape[1]).context.double().cpu()


def noise(model: nn.Module, outputs: Tensor) -> float:
    """The change of an output that may be rounding."""
    dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
    return reach.rounding(dtype) * float(outputs.abs().max())


def given(sample: Tensor) -> Tensor:
    """Ids (b, t) of a sample."""
    return sample.detach() if sample.dim() == 2 else sample.detach().unsqueeze(0)


def fitting(model: nn.Module) -> Tensor | None:
    """Ids (b, t) that a model takes, below the size of one of its embeddings; None where it takes none."""
    sizes = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    for size in dict.fromkeys(size for size in sizes if size > 3):
        for t in (TOKENS, *FEWER):
            ids = torch.randint(size // 2, size, (BATCH, t), generator=torch.Generator().manual_seed(t)).to(device)
            with contextlib.suppress(Exception):  # whatever somebody's model raises on what it does not take
                if run(model, ids).shape[:2] == ids.shape:
                    return ids
    return None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which a model is in evaluation mode, without a copy of its weights; modes and random states are put back."""
    modes = [(part, part.training) for part in model.modules()]
    buffers = [(x, x.clone()) for x in model.buffers() if x.numel() < 2**20]
    with random_states(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for part, _ in modes:
                part.training = False
            yield
        finally:
            for part, mode in modes:
                part.training = mode
            with torch.no_grad():
                for x, value in buffers:
                    x.copy_(value)
