"""The states of a loop that a model writes out, what was written to them and read from them, and the traces of such tensors."""

import weakref
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.handwritten.products.tensor_axes import Axes, Dims
from regard.observe.interception.provenance import ModuleFrame

MIN_TOKENS = 4  # of a loop or a scan over tokens
START = -1  # the place of the state before the first write
CHANGED = "one of its tensors was changed in place after it was read"


Sources = tuple["weakref.ref[Tensor]", ...]  # of a followed tensor, as the log of a module has them


class Factor(NamedTuple):
    """A tensor, and the axes of a state that each of its dimensions has: none where it is broadcast.

    version says how often the tensor had been written into.
    """

    tensor: Tensor
    dims: Dims
    version: int = 0


class Decay(NamedTuple):
    """What a state was multiplied by, and the factors whose product this is the exponential of, if it is one.

    sources are the tensors that it was multiplied by, as the module's log has them.
    """

    factor: Factor
    exponents: tuple[Factor, ...] = ()
    sources: "Sources" = ()


class Write(NamedTuple):
    """A state as the sum of the one at the place `before`, times decays, and of a product of factors.

    correction is the place of the read that was subtracted from the value, as a delta rule does. token_factors is the number of
    its factors that depend on tokens.
    """

    before: int
    decays: tuple[Decay, ...]
    factors: tuple[Factor, ...]
    correction: int | None = None
    token_factors: int = 0
    sources: Sources = ()


class Read(NamedTuple):
    """The sum over axes of the states at some places, along the axes `time` if there are several, times decays and a query."""

    places: tuple[int, ...]
    time: Axes
    decays: tuple[Decay, ...]
    query: Factor
    output: Factor
    function: str
    made: "weakref.ref[Tensor]"  # the tensor that was read
    sources: Sources = ()  # of the query


class LeftState(NamedTuple):
    """The recorded loop that has left a state: the id of its module, and whether its mechanism has rates.

    weight_share (b, h, d, e) is the part of the state that no token has written; None if there is none.
    """

    module: int
    has_rates: bool
    weight_share: Tensor | None = None


@dataclass(eq=False)
class StateLoop:
    """The states of one loop: what was written, in order, and what was read.

    initial is the state before the first write, None for zeros; left says which recorded loop has left it, if one has.
    starts_from_weights says that it was made of parameters or constants, and multiplied by the first decay already.
    """

    initial: Tensor | None = None
    left: LeftState | None = None
    starts_from_weights: bool = False
    frames: list[ModuleFrame] = field(default_factory=list)  # those in which all writes were
    first_frame: ModuleFrame | None = None  # the innermost one of the first write
    shape: tuple[int, ...] = ()
    dims: Dims = ()
    writes: list[Write] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # the number of writes up to each
    reads: list[Read] = field(default_factory=list)
    sums: dict[int, Tensor] = field(default_factory=dict)  # the first sum of what was read with something else, by the read
    last: "weakref.ref[Tensor] | None" = None  # the state after the last write
    made: "list[weakref.ref[Tensor]]" = field(default_factory=list)  # the state after each write
    reason: str = ""  # why it cannot be read, if that is known
    has_token_weights: bool = False  # whether its decays, queries or keys depend on tokens
    has_rates: bool = False  # whether its mechanism has, once it was read
    weight_share: Tensor | None = None  # the part of its last state that no token has written, once it was read
    is_reported: bool = True  # whether it is missed if it cannot be read
    is_recorded: bool = False  # whether it was read and its outputs were those of its formula
    is_cut: bool = False  # whether a state between two tokens was detached from its gradients
    changeable_reads: int = 0  # those up to which interventions could change the joined rows
    unchangeable: str = ""  # why they could not change the others, if that is known

    def add_write(self, frames: list[ModuleFrame], write: Write, y: Tensor) -> int:
        """Add a write whose result is y, and return its place."""
        if not self.writes:
            self.frames, self.first_frame = list(frames), frames[-1]
        self.frames = [one for one, other in zip(self.frames, frames, strict=False) if one is other]
        self.depths.append(1 if write.before == START else self.depths[write.before] + 1)
        self.writes.append(write)
        self.has_token_weights |= write.token_factors > 1
        self.last = weakref.ref(y)
        self.made.append(self.last)
        return len(self.writes) - 1

    @property
    def has_several_tokens(self) -> bool:
        """Whether states follow each other."""
        return max(self.depths, default=0) > 1

    @property
    def is_read_as_it_grows(self) -> bool:
        """Return whether different states of products of tokens with tokens were read."""
        places = {place for read in self.list_outputs() for place in read.places}
        return self.has_several_tokens and len(places) > 1 and all(one.token_factors > 1 for one in self.writes)

    def list_outputs(self) -> list[Read]:
        """Return the reads that no write was corrected by."""
        corrections = {write.correction for write in self.writes}
        return [read for n, read in enumerate(self.reads) if n not in corrections]


class Product(NamedTuple):
    """A tensor as the product of views of its shape, or as the exponential of one.

    correction is a read that was subtracted from one of its factors, the value. token_factors is the number of its factors that
    depend on tokens; sources are the tensors that it was made of.
    """

    factors: tuple[Tensor, ...]
    is_exponential: bool = False
    correction: "ReadTrace | None" = None
    token_factors: int = 0
    sources: Sources = ()

    @property
    def is_plain(self) -> bool:
        """Whether it is a product and nothing else."""
        return not self.is_exponential and self.correction is None


class State(NamedTuple):
    """A tensor as the states of a loop at some places, times decays."""

    loop: StateLoop
    places: tuple[int, ...]
    dims: Dims
    decays: tuple[Decay, ...] = ()
    time: Axes = ()
    product: Product | None = None  # what it was before it was known to be a state


def is_zeros(trace: Any) -> bool:
    """Return whether a tensor is a state of zeros before the first write."""
    return isinstance(trace, State) and trace.places == (START,) and trace.loop.initial is None


class ReadTrace(NamedTuple):
    """A tensor as what was read from a state of a loop, by the place of the read.

    order is that of its entries among those that were read, if interventions may change them.
    """

    loop: StateLoop
    place: int
    order: Tensor | None = None


@dataclass(eq=False)
class ChannelState:
    """A state that is a vector of channels: the one before times a factor, plus a product; none is before the first."""

    before: "ChannelState | None"
    decay: Tensor | None  # None for 1
    added: tuple[Tensor, ...]
    shape: torch.Size
    gates: tuple[Tensor, ...] = ()  # whose product the factor is


class Channels(NamedTuple):
    """A tensor as a state that is a vector, times a factor, None for 1, that is the product of gates."""

    state: ChannelState
    factor: Tensor | None = None
    gates: tuple[Tensor, ...] = ()

    def multiply(self, by: Any, gate: Any = None) -> "Channels":
        """Return it times a number or a tensor, which a gate was made to."""
        gates = self.gates if gate is None else (*self.gates, gate)
        if isinstance(by, Tensor):
            gates, by = gates if gate is not None else (*gates, by), by.detach()
        else:
            by = torch.tensor(float(by), dtype=self.state.added[0].dtype, device=self.state.added[0].device)
        return Channels(self.state, by if self.factor is None else self.factor * by, gates)

    def reshape(self, shape: torch.Size, after: torch.Size) -> "Channels":
        """Return it in another shape."""
        return self if self.factor is None else self._replace(factor=self.factor.expand(shape).reshape(after))

    def add(self, other: "Channels") -> "Channels | None":
        """Return the sum of both if the state of the other is the same or the next one, else None."""
        one, by = (torch.ones(()) if x.factor is None else x.factor for x in (self, other))
        gates, last = (*self.gates, *other.gates), other.state
        if self.state is last:
            return Channels(self.state, one + by, gates)
        if last.before is not self.state:
            return None
        decay = one + (by if last.decay is None else by * last.decay)
        return Channels(ChannelState(self.state, decay, (by, *last.added), last.shape, (*gates, *last.gates)))

    def settle(self) -> "Channels":
        """Return the state times the factor as a state of its own, in place of the other one."""
        if self.factor is None:
            return self
        one = self.state
        decay = None if one.before is None else self.factor if one.decay is None else self.factor * one.decay
        return Channels(ChannelState(one.before, decay, (self.factor, *one.added), one.shape, (*self.gates, *one.gates)))

    def write(self, added: tuple[Tensor, ...], shape: torch.Size) -> "Channels":
        """Return the state that a token makes of it by adding a product."""
        return Channels(ChannelState(self.state, self.factor, added, shape, self.gates))


class Factors(NamedTuple):
    """A tensor of the shape of a state that is a vector, as the product of others, entry by entry."""

    tensors: tuple[Tensor, ...]


class SumKind(Enum):
    """What a running sum over tokens is of: decays, what is written over them, or the logarithms of either."""

    LOGS = auto()
    DIVISORS = auto()  # LOGS plus a number, or a number over them
    DECAYS = auto()
    LOG_TERMS = auto()
    TERMS = auto()
    LOG_SUMS = auto()
    SUMS = auto()


class RunningSum(NamedTuple):
    """A tensor as running sums, or what goes into them: decays or their logarithms, and what is written or its logarithms.

    sign is -1 if it is, or what is written was multiplied by, one over the running product of decays, or over running sums.
    factors are the two tensors whose product what is summed up is, if it is one.
    """

    kind: SumKind
    decays: Tensor
    is_log: bool  # whether decays are logarithms
    axis: int
    sign: int = 1
    written: Tensor | None = None
    factors: tuple[Tensor, ...] = ()


class Spectrum(NamedTuple):
    """A tensor as a number times the product of the Fourier transforms, of a length n, of one or two signals.

    is_inverse says that the product was transformed back.
    """

    signals: tuple[Tensor, ...]
    n: int
    factor: float = 1.0
    is_inverse: bool = False


class Shifted(NamedTuple):
    """A tensor as another one moved by one token along an axis, perhaps with one more token at the end."""

    whole: Tensor
    axis: int


Trace = Product | State | ReadTrace | Channels | Factors | RunningSum | Spectrum | Shifted
