"""Delta rules in chunks of tokens: what is written to a state are values less what keys read from it, times beta.

Within a chunk, these are the inverse of 1 + tril(beta k kᵀ, -1) times the values, less what they read from the state before the
chunk. They make a recurrence whose values they are: beta and the layer's own values follow from its states, token by token.
Source: Yang et al. 2024, Parallelizing linear transformers with the delta rule over sequence length.
"""

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, walk_back
from regard.observe.interception.handwritten.recurrences.loop_check import ROUNDINGS, compare_outputs
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation
from regard.observe.interception.recurrent.recurrence_call import RecurrenceFactors

CORRECTED = (
    "it is linear attention in chunks that write what depends on the state before, as a delta rule does, but no values are "
    "known that a delta rule makes this of"
)


def list_refs(frame: ModuleFrame, x: Tensor | TensorRef, passes_products: bool = True) -> list[TensorRef]:
    """Return the tensors that a tensor was made of in a module behind its layers, or its last products, itself first."""

    def is_behind_layers(maker: Operation, n: int, size: int) -> bool:
        if maker.child is not None or infer_role(maker.name) is not Role.PRODUCT:
            return maker.child is None
        return passes_products and all(frame.find_contents(one) == TOKEN for one in maker.given)

    start = weakref.ref(x) if isinstance(x, Tensor) else x
    return [one for _, (one, _), _ in walk_back([frame], (start, 0), is_behind_layers)]


def list_sources(frame: ModuleFrame, x: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor was made of in a module behind its layers and that are still held, itself first."""
    return [y for one in list_refs(frame, x) if (y := one()) is not None]


def list_mixed_values(frame: ModuleFrame, x: Tensor, k: Tensor) -> list[list[Tensor | None]]:
    """Return the operands, if not freed, of the products that x is a sum of and that have one of products with keys k.

    So it is with values that are multiplied with the inverse that a delta rule in chunks makes of its keys.
    """
    makers = [maker for one in list_refs(frame, x, passes_products=False) for maker in frame.find_makers(one)]
    products = [maker.given for maker in makers if maker.child is None and infer_role(maker.name) is Role.PRODUCT]
    mixed = [given for given in products if any(are_corrected(frame, one, k) for one in given)]
    return [[one() for one in given] for given in mixed]


def are_corrected(frame: ModuleFrame, v: Tensor | TensorRef, k: Tensor) -> bool:
    """Return whether values were made of products with their keys, as those that a delta rule writes within a chunk."""
    own, keys = ({*map(id, list_refs(frame, x, passes_products=False))} for x in (v, k))
    behind = keys - own
    return any(id(one) in behind for one in list_refs(frame, v))


def read_delta_rule(factors: RecurrenceFactors, sources: list[Tensor], initial: Tensor | None) -> RecurrenceFactors:
    """Return a recurrence from an initial state as a delta rule with values (b, h, t, e) among some tensors.

    Raises UnreadableError if it is none.
    """
    mechanism = factors.mechanism
    assert isinstance(mechanism, LinearRecurrence)
    tensors, written = mechanism.tensors, factors.values.double()
    b, h, t, e = written.shape
    k, decay = (tensors[name].double().expand(b, h, t, -1) for name in ("k", "decay"))
    if "key_scale" in tensors:
        raise UnreadableError(CORRECTED)
    state, read = written.new_zeros(b, h, k.shape[3], e) if initial is None else initial.double(), []
    for i in range(t):
        state = decay[:, :, i].exp().unsqueeze(3) * state
        read.append((k[:, :, i].unsqueeze(2) @ state).squeeze(2))
        state = state + k[:, :, i].unsqueeze(3) * written[:, :, i].unsqueeze(2)
    known, eps = torch.stack(read, 2), torch.finfo(factors.outputs.dtype).eps
    for source in sources:
        for values in arrange_values(source, (b, h, t, e)):
            corrected = values.double() - known
            norm = corrected.square().sum(3)
            beta = (written * corrected).sum(3) / torch.where(norm > 0, norm, 1)
            size = written.abs() + beta.abs().unsqueeze(3) * (values.double().abs() + known.abs())
            difference = (written - beta.unsqueeze(3) * corrected).abs()
            if bool((difference <= ROUNDINGS * t * eps * size).all()):
                delta = LinearRecurrence(
                    decay=mechanism.decay, q=mechanism.q, k=mechanism.k, beta=beta.to(mechanism.decay.dtype)
                )
                compare_outputs(delta, values, factors.outputs, initial)
                return replace(factors, mechanism=delta, values=values.contiguous())
    raise UnreadableError(CORRECTED)


def arrange_values(x: Tensor, shape: tuple[int, int, int, int]) -> list[Tensor]:
    """Return a tensor (b, h, t, e) or (b, t, h, e), whose tokens may be in chunks and padded, as (b, h, t, e) in each way.

    A single head may have no axis.
    """
    b, h, t, e = shape
    found, x = list[Tensor](), x.detach()
    if x.dim() not in (3, 4, 5) or x.shape[0] != b or x.shape[-1] != e:
        return found
    if h == 1:
        found.append(x.reshape(b, h, -1, e))
        return [one[:, :, :t] for one in found if one.shape[2] >= t]
    if x.shape[1] == h:
        found.append(x.reshape(b, h, -1, e))
    if x.shape[-2] == h:
        found.append(x.reshape(b, -1, h, e).transpose(1, 2))
    return [one[:, :, :t] for one in found if one.shape[2] >= t]
