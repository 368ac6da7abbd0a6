"""Loops whose first state is no token's: parameters or constants, whose share of the rows is left out of what is recorded."""

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS
from regard.observe.interception.handwritten.recurrences.state_loop import StateLoop
from regard.observe.interception.module_weights import is_part_of_parameter
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation
from regard.observe.interception.recurrent.recurrence_call import RecurrenceFactors, copy_sample

FROM_WEIGHTS = (
    "its states start from parameters or constants, which are no tokens: the map and its certificate are without what its "
    "queries read of these"
)
READ_FIRST = (
    "its states start from parameters or constants, which are read before the first token is written to them: that is not "
    "followed"
)
UNCHANGED = "its states start from parameters or constants, whose share of its rows would be lost, and stay unchanged"


def start_loop(frame: ModuleFrame, x: Tensor, added: Tensor | None) -> StateLoop:
    """Return a loop that starts from x: zeros, parameters or constants, or an unknown state, of which a sample is held.

    added is what the first token has added to x in place, if it has.
    """
    start = x.detach() if added is None else x.detach() - added.detach()
    if not bool(start.any()):
        return StateLoop()
    if is_made_of_weights(frame, x):
        return StateLoop(start.clone(), starts_from_weights=True)
    return StateLoop(copy_sample(start))


def is_made_of_weights(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether x is a parameter or constants, in another layout or times factors; a buffer, which may change, is not.

    Nor is what tokens were written into, joined with, added to, or multiplied with as matrices.
    """
    one = weakref.ref(x)
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(one)
        if not makers:
            return is_part_of_parameter(one())
        if any(has_tokens_beside(frame, maker) for maker in makers):
            return False
        maker = makers[0]
        if not maker.given:
            return maker.child is None
        one = maker.given[maker.sizes.index(max(maker.sizes))]
    return False


def has_tokens_beside(frame: ModuleFrame, maker: Operation) -> bool:
    """Return whether an operation, unless it multiplies entry by entry, has tokens among its arguments but the largest."""
    largest = maker.sizes.index(max(maker.sizes, default=0)) if maker.given else 0
    others = (one for n, one in enumerate(maker.given) if n != largest)
    return infer_role(maker.name) is not Role.MULTIPLY and any(frame.find_contents(one) == TOKEN for one in others)


def leave_out_weights(loop: StateLoop, factors: RecurrenceFactors, initial: Tensor | None) -> RecurrenceFactors:
    """Return the factors of a loop with outputs that lack what is read of weights that it, or one before it, started from.

    initial is its first state (b, h, d, e).
    """
    given = None if loop.left is None else loop.left.weight_share
    share = initial if loop.starts_from_weights else given
    if share is None or not isinstance(factors.mechanism, LinearRecurrence):
        return factors
    with torch.no_grad():
        rows, loop.weight_share = read_share(factors.mechanism, share, factors.outputs)
    return replace(factors, outputs=factors.outputs - rows, note=FROM_WEIGHTS)


def read_share(mechanism: LinearRecurrence, share: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what queries read of a part of the first state (b, h, d, e), as outputs (b, h, t, e), and what is left of it.

    Each query reads after its token is written.
    """
    _, h, t, _ = outputs.shape

    def expand(x: Tensor | None) -> Tensor:
        return outputs.new_ones(1, 1, 1, 1) if x is None else x.repeat_interleave(h // x.shape[1], 1)

    decays = (expand(mechanism.decay) * expand(mechanism.rates)).double().expand(-1, -1, t, -1).cumsum(2).exp()
    whole = expand(share).double()
    return (expand(mechanism.q) * decays @ whole).to(outputs.dtype), decays[:, :, -1:].mT * whole
