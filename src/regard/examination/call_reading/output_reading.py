"""Read how an output is made of weights and values: W_O of each head times the weights times the values of the same head.

Values are those of the call. Latent attention has one latent for all heads, and absorbs the weights that make its values in its
output: W_O[:, i] W_UV[i] (weights of head i) latent, in two products or in one folded matrix.
Source: DeepSeek-V2, section 2.1.2 and appendix C.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.examination.call_reading.projection_source import ModuleOutput
from regard.examination.call_reading.rounding import NEAR, is_near, solve_least_squares
from regard.examination.identify.projection_layouts import parse_matrix_role
from regard.mechanism.heads import share
from regard.observe.interception.attention_call import AttentionCall

MOST = 2**22  # weights of a call that are computed
TOKENS = 16  # whose values are compared with columns of outputs
MOST_HEADS = 32  # whose order is solved for
PAIRS = {  # which head's weights (b, w, q, k), values (b, v, k, e) and columns of the output (c, h, e) meet
    "bhqk,bgke,che->bqchg": "the columns of {2} of head {1} get the weights of head {1} and the values of head {0}",
    "bgqk,bhke,che->bqchg": "the columns of {2} of head {1} get the weights of head {0} and the values of head {1}",
    "bgqk,bgke,che->bqchg": "the columns of {2} of head {1} get the context of head {0}",
}
MEANS = {  # what the columns of every head get, where all heads are added up
    "bhqk,bgke,che->bqchg": "its own weights and {} of the values of all heads",
    "bgqk,bhke,che->bqchg": "{} of the weights of all heads and its own values",
    "bgqk,bgke,che->bqchg": "{} of the contexts of all heads",
}
VIEW = "View the weight of {} as (heads, keys' width + values' width, latent): the last part of each head makes its values."
SAME = "Multiply the weights of each head by the values of the same head, and the context by its own columns of {}."
ONCE = "Leave the division out: a row of weights sums to one, and weights @ v is the mean already."
DIVIDED = "not normalised"
PROJECT = "Project the joined heads once: y = self.{}(context). Weights that were trained in this way need it, and others not."
JOIN = "Join the heads with a transpose before the view: context.transpose(1, 2).reshape(b, t, heads * d)."
VIEWS = {  # orders of the axes of a context (b, h, t, e) whose view as (b, t, h e) mixes tokens
    (0, 1, 2, 3): "without a transpose",
    (0, 1, 3, 2): "of (b, heads, width, tokens)",
    (0, 3, 1, 2): "of (b, width, heads, tokens)",
    (0, 3, 2, 1): "of (b, width, tokens, heads)",
}
COLUMNS = "View the weight of {} as (width, heads, values' width): each head has neighboring columns."
VIEW_KEYS = "View the weight of {} as (heads, keys' width + values' width, latent): the first part of each head makes its keys."


class OutputReading(NamedTuple):
    """What is wrong with how an output is made, in words, the cure and the kind; all empty if it is right.

    `factor` is a number that the context is multiplied by.
    """

    wrong: str = ""
    cure: str = ""
    kind: str = ""
    factor: float = 1.0


class Part(NamedTuple):
    """Values (b, h, k, e), or weights (c, h, e) of the output, and what is wrong with this view of them."""

    numbers: Tensor
    reading: OutputReading


RIGHT = OutputReading()


def read_output(
    call: AttentionCall, module: nn.Module, place: str, outputs: Sequence[ModuleOutput], latent: int = 0
) -> OutputReading | None:
    """Return how an output is made of a call's weights and values, or of latents of a width; None if no known way gives it.

    `outputs` are those of the module at `place`, and of its parts.
    """
    b, h, q, _ = call.q.shape
    if b * h * q * call.k.shape[2] > MOST or (call.v is None and not latent):
        return None
    weights = call.build_map(call.k).dense().double()
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    is_strided = has_strided_heads(call.v, outputs)
    for last, out in sorted(linear.items(), key=lambda one: parse_matrix_role(one[0]) != "o"):  # those named after it first
        if out.in_features % h:
            continue
        e = out.in_features // h
        names = (place, f"{place}.{last}".lstrip("."))
        bias = 0 if out.bias is None else out.bias.detach().double()
        wrong = None if latent else find_wrong_projection(weights, call, out, last, [y for y in outputs if y.name == place])
        if wrong is not None:
            return wrong
        targets = [one.output for one in outputs if one.name in names and one.output.shape == (b, q, out.out_features)]
        sources = [list_latent_values(call.k[:, :1, :, :latent].double(), part, h, e, name) for name, part in linear.items()]
        columns = list(list_columns(out, h, last, is_strided))
        for values in sources if latent else [list_values(call, e)]:
            found = match_output(weights, list(values), columns, (last, out), [y.double() - bias for y in targets])
            if found is not None:
                return found
    return None


def match_output(
    weights: Tensor, values: Sequence[Part], columns: Sequence[Part], out: tuple[str, nn.Linear], targets: Sequence[Tensor]
) -> OutputReading | None:
    """Return the first views of values and of the output's weights that give a target; None if none do."""
    last, projection = out
    for y in targets if values else ():
        for one in values:
            context = weights @ one.numbers
            for other in columns:
                made = torch.einsum("bhte,che->btc", context, other.numbers)
                factor = find_factor(made, y)
                if factor is not None:
                    return (one.reading if one.reading.wrong else other.reading)._replace(factor=factor)
                if not one.reading.wrong and not other.reading.wrong and is_divided_by_counts(weights, made, y):
                    return OutputReading("each context is divided by the number of keys that its query sees", ONCE, DIVIDED)
            for order, how in VIEWS.items() if not one.reading.wrong and len(weights[0]) > 1 else ():
                viewed = context.permute(order).reshape(*y.shape[:2], -1)
                if is_near(viewed @ projection.weight.detach().double().mT, y):
                    return OutputReading(f"heads are joined by a view {how}", JOIN, "mixed heads")
        wrong = find_other_head(weights, values[0].numbers, columns[0].numbers, y, last)
        if wrong is not None:
            return wrong
    return None


def find_wrong_projection(
    weights: Tensor, call: AttentionCall, out: nn.Linear, last: str, outputs: Sequence[ModuleOutput]
) -> OutputReading | None:
    """Return how a module changes what its output projection makes of the heads: a bias or all of it twice, or transposed."""
    values = next(list_values(call, out.in_features // call.q.shape[1]), None)
    if values is None or parse_matrix_role(last) in ("q", "k", "v"):  # a weight that is shared with the output by design
        return None
    context = (weights @ values.numbers).transpose(1, 2).flatten(2)
    weight, bias = out.weight.detach().double(), 0 if out.bias is None else out.bias.detach().double()
    once = context @ weight.mT + bias
    ways = {}
    if out.bias is not None:
        ways[f"the bias of {last} is added twice"] = once + bias
    if out.in_features == out.out_features:
        ways[f"{last} is applied twice"] = once @ weight.mT + bias
        ways[f"the weight of {last} is used without its transpose"] = context @ weight + bias
    for y in (one.output.double() for one in outputs if one.output.shape == once.shape):
        for does, made in ways.items():
            if is_near(made, y) and not is_near(once, y):
                return OutputReading(does, PROJECT.format(last), "wrong output")
    return None


def list_values(call: AttentionCall, e: int) -> Iterator[Part]:
    """Yield the values of a call, one for each head, if they have this width."""
    if call.v is not None and call.v.shape[-1] == e and call.v.shape[2] == call.k.shape[2]:
        yield Part(share(call.v.double(), call.q.shape[1]), RIGHT)


def list_latent_values(latent: Tensor, part: nn.Linear, h: int, e: int, name: str) -> Iterator[Part]:
    """Yield the values that the weights of a part may make of latents (b, 1, k, latent), right ones first."""
    weight, width = part.weight.detach().double(), latent.shape[-1]
    rows = len(weight) // h
    if part.in_features != width or len(weight) % h or rows < e:
        return
    by_head, by_row, cure = weight.unflatten(0, (h, rows)), weight.unflatten(0, (rows, h)).transpose(0, 1), VIEW.format(name)
    yield Part(latent @ by_head[:, rows - e :].mT, RIGHT)
    if rows > e:
        keys = f"the part of {name} that makes keys is absorbed in the output, not the part that makes values"
        yield Part(latent @ by_head[:, :e].mT, OutputReading(keys, cure, "wrong roles"))
    exchanged = (
        f"the weight of {name} is viewed with the axes of heads and width exchanged where it makes values: heads are mixed"
    )
    yield Part(latent @ by_row[:, rows - e :].mT, OutputReading(exchanged, cure, "mixed heads"))
    transposed = f"the part of {name} that makes values is transposed: its numbers are read as (latent, width)"
    yield Part(latent @ by_head[:, rows - e :].reshape(h, width, e), OutputReading(transposed, cure, "wrong roles"))


def list_columns(part: nn.Linear, h: int, name: str, is_strided: bool) -> Iterator[Part]:
    """Yield the weights (c, h, e) of each head that may make the output, right ones first.

    Columns of a head that are not neighbors are right where its values are not neighbors either (`is_strided`).
    """
    weight = part.weight.detach().double()
    yield Part(weight.unflatten(1, (h, -1)), RIGHT)
    if h == 1:
        return
    if is_strided:
        yield Part(weight.unflatten(1, (-1, h)).mT, RIGHT)
    viewed = f"the columns of {name} are viewed as (width, heads): heads are mixed"
    yield Part(weight.unflatten(1, (-1, h)).mT, OutputReading(viewed, COLUMNS.format(name), "mixed heads"))


def has_strided_heads(v: Tensor | None, outputs: Sequence[ModuleOutput]) -> bool:
    """Return whether values (b, h, k, e) are columns of an output (b, k, n) in the order (e, h): heads are not neighbors."""
    if v is None or 1 in (v.shape[1], v.shape[-1]):
        return False
    b, _, k, _ = v.shape
    own = [i for i in range(v.shape[1]) if not i or not torch.equal(v[:, i], v[:, i - 1])]  # of grouped values each once
    if len(own) == 1:
        return False
    v = v[:, own]
    columns = v.double().permute(3, 1, 0, 2).flatten(2).flatten(0, 1)[:, :TOKENS]  # (e h, tokens)
    for y in (one.output.double() for one in outputs if one.output.dim() == 3 and one.output.shape[:2] == (b, k)):
        distances = torch.cdist(columns, y.flatten(0, 1)[:TOKENS].mT, p=torch.inf)  # (e h, n)
        places = distances.argmin(1)
        if float(distances.amin(1).max()) <= NEAR * float(v.abs().max()) and bool((places.diff() > 0).all()):
            return True
    return False


def find_other_head(weights: Tensor, values: Tensor, columns: Tensor, y: Tensor, last: str) -> OutputReading | None:
    """Return that a head is combined with another one, or with all; None if neither gives y (b, q, c), or the right one does.

    The output is linear in the h² factors of each pair of heads, which are solved for.
    """
    b, h, q, _ = weights.shape
    column_count = min(len(columns), math.ceil(4 * h * h / (b * q)))
    if not 1 < h <= MOST_HEADS or column_count * b * q < h * h:
        return None
    target = y[..., :column_count].flatten()
    for product, what in PAIRS.items():
        pairs = torch.einsum(product, weights, values, columns[:column_count]).flatten(0, 2).flatten(1)
        solved = solve_least_squares(pairs, target)
        if solved is None:
            return None
        factors = solved.view(h, h)
        if is_near(factors, factors.mean().expand(h, h)) and is_near(pairs.sum(1) * factors.mean(), target):
            every = MEANS[product].format("the mean" if is_near(factors.sum(1), torch.ones_like(factors[0])) else "the sum")
            return OutputReading(f"the columns of {last} of each head get {every}", SAME.format(last), "mixed heads")
        chosen = factors.argmax(1)
        selected = torch.zeros_like(factors).scatter_(1, chosen.unsqueeze(1), 1.0)
        i = next((i for i, j in enumerate(chosen.tolist()) if i != j), None)
        if i is not None and is_near(factors, selected) and is_near(pairs @ selected.flatten(), target):
            return OutputReading(what.format(int(chosen[i]), i, last), SAME.format(last), "mixed heads")
    return None


def is_divided_by_counts(weights: Tensor, made: Tensor, y: Tensor) -> bool:
    """Return whether an output (b, q, c) is `made` with each row divided by its number of keys, which is not that of all."""
    counts = (weights > 0).any(1).sum(-1, keepdim=True)
    return bool((counts != counts[:1, :1]).any()) and is_near(made / counts.clamp_min(1), y)


def find_factor(one: Tensor, other: Tensor) -> float | None:
    """Return the factor that makes one tensor another, up to rounding; None if there is none."""
    size = float(one.square().sum())
    factor = float((one * other).sum()) / size if size > 0 else 1.0
    return factor if is_near(factor * one, other) else None


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
    """Return how queries were absorbed in a call with one key for all heads; None if they were not, or that does not show.

    A score q · (W c), of a query's head and its key W c from the latent c, is (q W) · c.
    """
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
    cure = VIEW_KEYS.format(name)
    yield AbsorbedQueries(0, 0), separate_heads[:, :n]
    viewed = f"the weight of {name} is viewed with the axes of heads and width exchanged: heads are mixed"
    yield AbsorbedQueries(0, 0, 0, viewed, cure, "mixed heads"), mixed_heads[:, :n]
    if rows > n:
        values = f"the part of {name} that makes values is absorbed in the queries, not the part that makes keys"
        yield AbsorbedQueries(0, 0, 0, values, cure, "wrong roles"), separate_heads[:, -n:]
