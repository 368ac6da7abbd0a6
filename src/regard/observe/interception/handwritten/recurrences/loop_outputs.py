"""The outputs of a loop, from the products that read its states to the tensor that joins their rows, for interventions.

Where nothing but that tensor uses the rows, it is the layer's output, and a change of it is one of the layer.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import CallAdapter, adapt_entries, build_plain_call
from regard.observe.interception.call_dispatch import change_recurrence, explain_error, report_unchangeable
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, VIEWS
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.recurrences.learned_starts import UNCHANGED
from regard.observe.interception.handwritten.recurrences.loop_recurrence import IN_PARTS, name_kernel, read_layout, read_loop
from regard.observe.interception.handwritten.recurrences.state_loop import Factor, ReadTrace, StateLoop
from regard.observe.interception.lookups import JOINS_PARTS
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

KEEPS_ROWS = VIEWS | PERMUTES | COPIES
USED = "the rows of its loop are used one by one ({}), before they are joined to one tensor, and stay unchanged"
STEPS = "the steps of its loop are modules of their own, which may use its rows, and stay unchanged"
COPY = "its loop goes on from a copy of a state, or from one that nothing in this block has left, and stays unchanged"
CUT = "its states are cut from their gradients between two tokens, so that those of its entries are not known"
SHARED = "several batch rows or heads share the rows of its loop, which stay unchanged"


class JoinedRows(NamedTuple):
    """All rows of a loop in one tensor, by the number of each entry; in_place says that they were written into the tensor.

    The number of an entry is that of the read times the entries of one, plus its place in what was read.
    """

    loop: StateLoop
    numbers: Tensor
    in_place: bool = False


class LoopOutputs:
    """The outputs of the loops of one forward, followed while an intervention may change them."""

    def __init__(self) -> None:
        self.is_active = False
        self.joined: JoinedRows | None = None  # by the function that ran last
        self.channels: Any = None  # the states of a loop over vectors that the function that ran last has joined
        self.written = WeakTensorKeyDictionary()  # the numbers of the entries of tensors that rows are written into

    def clear(self) -> None:
        """Forget all outputs."""
        self.joined = self.channels = None
        self.written.clear()

    def start(self, loop: StateLoop, y: Tensor) -> Tensor | None:
        """Return the order of the entries of y, which the last read of a loop has made: of all rows if it read all states."""
        if not self.is_active:
            return None
        order = torch.arange(y.numel(), device=y.device).view(y.shape)
        if loop.reads[-1].time:
            self.joined = JoinedRows(loop, order + (len(loop.reads) - 1) * y.numel())
        return order

    def join(self, frame: ModuleFrame, func: Any, args: Any, kwargs: Any, traces: Sequence[Any], y: Tensor) -> None:
        """Follow y, to which a function has joined tensors with these traces: perhaps all rows of a loop."""
        rows = [one for one in traces if isinstance(one, ReadTrace) and one.order is not None]
        if rows and len(rows) == len(traces) and all(one.loop is rows[0].loop for one in rows) and "out" not in kwargs:
            self.finish(frame, JoinedRows(rows[0].loop, func([number_entries(one) for one in rows], *args[1:], **kwargs)), y)

    def write(self, frame: ModuleFrame, x: Tensor, index: Any, row: ReadTrace) -> None:
        """Follow x, into which a row was written: perhaps the last one of a loop."""
        if row.order is None:
            return
        if x not in self.written:
            self.written[x] = torch.full(x.shape, -1, device=x.device)
        numbers = self.written[x]
        numbers[index] = number_entries(row)
        if bool((numbers >= 0).all()):
            self.finish(frame, JoinedRows(row.loop, numbers, in_place=True), x)

    def finish(self, frame: ModuleFrame, found: JoinedRows, y: Tensor) -> None:
        """Follow y, which holds rows of a loop, if it holds all so far and nothing else has used one."""
        loop = found.loop
        corrections = {write.correction for write in loop.writes}
        outputs = [n for n in range(len(loop.reads)) if n not in corrections]
        size = loop.reads[outputs[0]].output.tensor.numel()
        every = torch.cat([torch.arange(n * size, (n + 1) * size, device=y.device) for n in outputs])
        if not torch.equal(found.numbers.flatten().sort().values, every):
            return
        use = find_use(frame, [loop.reads[n].made for n in outputs], y)
        if loop.first_frame is not frame or use:
            loop.unchangeable = USED.format(use) if use else STEPS
        else:
            self.joined = found


def change_rows(found: JoinedRows, table: AxisTable, y: Tensor) -> Tensor:
    """Return what interventions make of y, which holds the rows of a loop; y itself if they were written into it."""
    loop = found.loop
    try:
        with disable_modes():
            call, adapter = read_joined(found, table, y)
    except Exception as error:  # must not stop the model
        is_copy = loop.initial is not None and loop.left is None and not loop.starts_from_weights
        loop.unchangeable = COPY if is_copy else explain_error(error)
        report_unchangeable(name_kernel(loop), loop.unchangeable)
        return y
    loop.changeable_reads, loop.unchangeable = len(loop.reads), IN_PARTS
    new: Tensor = change_recurrence(call, adapter)[1].run()
    return new if new is y or not found.in_place else y.copy_(new)


def number_entries(row: ReadTrace) -> Tensor:
    """Return the numbers of the entries of a tensor that was read."""
    assert row.order is not None
    return row.order + row.place * row.order.numel()


def find_use(frame: ModuleFrame, rows: "list[weakref.ref[Tensor]]", joined: Tensor) -> str:
    """Return the name of what ran in a module and uses a row, or the tensor that rows were written into; "" if nothing does."""
    known, ends = {*map(id, rows)}, {id(weakref.ref(joined))}
    for one in frame.list_operations():
        name = strip_affixes(one.name)
        given = {*map(id, one.given)}
        if given.isdisjoint(known | ends) or name in JOINS_PARTS or name == "setitem":
            continue
        if given & ends or one.child is not None or name not in KEEPS_ROWS:
            return one.name
        known |= {*map(id, one.results)}
    return ""


def read_joined(found: JoinedRows, table: AxisTable, y: Tensor) -> tuple[RecurrenceCall, CallAdapter]:
    """Return the call whose rows y holds, and how y converts to its output (b, h, t, e) and back.

    Raises UnreadableError if the loop cannot be read, if several batch rows or heads share its rows, or if a state between two
    tokens has no gradient.
    """
    loop = found.loop
    if torch.is_grad_enabled() and loop.is_cut:
        raise UnreadableError(CUT)
    if loop.starts_from_weights or (loop.left is not None and loop.left.weight_share is not None):
        raise UnreadableError(UNCHANGED)
    tokens, joiner, roles = read_layout(loop, table)
    shape, size = tokens.reads[0].output.tensor.shape, tokens.reads[0].output.tensor.numel()
    places = {id(read): n for n, read in enumerate(loop.reads)}
    entries = torch.arange(size, device=y.device).view(shape)
    parts = [Factor(entries + places[id(read)] * size, read.output.dims) for read in tokens.reads]
    numbers = joiner.join(parts)
    own = table.arrange(numbers.tensor, numbers.dims, (roles.batch, roles.heads, roles.time, roles.width))
    call, _ = read_loop(loop, table)
    factors = call.read()
    if own.numel() < factors.outputs.numel():
        raise UnreadableError(SHARED)
    order = torch.empty(len(loop.reads) * size, dtype=torch.long, device=y.device)
    order[own.flatten()] = torch.arange(own.numel(), device=y.device)
    adapter = adapt_entries(y, order[found.numbers], own.shape)
    adapter.plain_call = build_plain_call(factors.outputs, factors.values, kernel=call.kernel, can_use_cache=False)
    return call, adapter
