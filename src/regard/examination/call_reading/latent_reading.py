"""Read absorbed products of latent attention: queries times the weights that make keys of a latent, one key for all heads.

A score q · (W c), of a query's head and its key W c from the latent c, is (q W) · c: the weights W (n, latent) of each head are
absorbed in its query. Source: DeepSeek-V2, section 2.1.2 and appendix C.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.projection_source import ModuleOutput
from regard.examination.call_reading.rounding import is_near
from regard.examination.identify.projection_layouts import parse_matrix_role
from regard.observe.interception.attention_call import AttentionCall

VIEW = "View the weight of {} as (heads, keys' width + values' width, latent): the first part of each head makes its keys."


class AbsorbedQueries(NamedTuple):
    """The width of queries and keys before they were absorbed, how many of it have no positions, and what is wrong.

    `latent` is the width of the latent.
    """

    width: int
    columns: int
    latent: int = 0
    wrong: str = ""
    cure: str = ""
    kind: str = ""


def read_absorbed_queries(call: AttentionCall, module: nn.Module, outputs: Sequence[ModuleOutput]) -> AbsorbedQueries | None:
    """Return how queries were absorbed in a call with one key for all heads; None if they were not, or that does not show."""
    q, k = call.q.double(), call.k.double()
    h = q.shape[1]
    if h < 2 or (k.shape[1] != 1 and not bool((k == k[:, :1]).all())):
        return None
    latents = {one.output.shape[-1] for one in outputs if is_latent(one.output, k[:, 0])}
    for name, part in module.named_modules():
        if not isinstance(part, nn.Linear) or part.in_features not in latents:
            continue
        for plain in find_plain_queries(q, k.shape[-1] - part.in_features, outputs):
            for found, weight in list_absorbed_weights(part.weight.detach().double(), h, plain, name):
                made = torch.einsum("bhtn,hnl->bhtl", plain, weight)
                if made.shape[:3] == q.shape[:3] and is_near(made, q[..., : part.in_features]):
                    width = plain.shape[-1] + k.shape[-1] - part.in_features
                    return found._replace(width=width, columns=plain.shape[-1], latent=part.in_features)
    return None


def is_latent(output: Tensor, k: Tensor) -> bool:
    """Return whether the first columns of keys (b, t, d) are a module's output (b, t, latent)."""
    width = output.shape[-1]
    return (
        output.dim() == 3
        and output.shape[:2] == k.shape[:2]
        and width <= k.shape[-1]
        and is_near(output.double(), k[..., :width])
    )


def find_plain_queries(q: Tensor, rotated: int, outputs: Sequence[ModuleOutput]) -> Iterator[Tensor]:
    """Yield the columns without positions of queries (b, h, t, n) before they were absorbed."""
    b, h, t, _ = q.shape
    for one in outputs:
        width = one.output.shape[-1] // h
        if parse_matrix_role(one.name) == "q" and one.output.shape == (b, t, width * h) and width > rotated:
            plain = one.output.double().unflatten(-1, (h, width)).transpose(1, 2)
            yield plain[..., : width - rotated]
            if rotated:
                yield plain[..., rotated:]


def list_absorbed_weights(weight: Tensor, h: int, plain: Tensor, name: str) -> Iterator[tuple[AbsorbedQueries, Tensor]]:
    """Yield the weights (h, n, latent) that may be absorbed, right ones first, of a projection (h (n + e), latent)."""
    n, rows = plain.shape[-1], len(weight) // h
    if len(weight) % h or rows < n:
        return
    separate_heads, mixed_heads = weight.unflatten(0, (h, rows)), weight.unflatten(0, (rows, h)).transpose(0, 1)
    cure = VIEW.format(name)
    yield AbsorbedQueries(0, 0), separate_heads[:, :n]
    viewed = f"the weight of {name} is viewed with the axes of heads and width exchanged: heads are mixed"
    yield AbsorbedQueries(0, 0, 0, viewed, cure, "mixed heads"), mixed_heads[:, :n]
    if rows > n:
        values = f"the part of {name} that makes values is absorbed in the queries, not the part that makes keys"
        yield AbsorbedQueries(0, 0, 0, values, cure, "wrong roles"), separate_heads[:, -n:]
