"""Attention in each spelling of a grammar is recorded by its formula, as the weights that its output has of its values.

A spelling is a product of queries and keys, a layout of heads and tokens, a scale, a bias, a mask, a softmax, and a product
with the values. Each pair of two such choices is in one of the cases.
"""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard import Causal, Everything, Given, Window

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D = 2, 3, 7, 17
C = H * D
LEFT, SOFTCAP, SCALE = 2, 0.3, 1 / math.sqrt(D)

LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = {
    # of (b, t, h, d), back to it, and the letters of the axes
    "heads before tokens": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2), "bh?d"),
    "heads behind tokens": (lambda x: x, lambda x: x, "b?hd"),
    "heads in the batch": (
        lambda x: x.transpose(1, 2).flatten(0, 1),
        lambda x: x.unflatten(0, (-1, H)).transpose(1, 2),
        "n?d",
    ),
    "the batch in heads": (
        lambda x: x.permute(2, 0, 1, 3).flatten(0, 1),
        lambda x: x.unflatten(0, (H, -1)).permute(1, 2, 0, 3),
        "n?d",
    ),
    "one head": (lambda x: x.squeeze(2), lambda x: x.unsqueeze(2), "b?d"),
    "one sentence": (lambda x: x[0, :, 0], lambda x: x[None, :, None], "?d"),
}
ONE_HEAD = "one head", "one sentence"


def put_tokens_last(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "heads behind tokens" else x


def find_letters(layout: str, name: str) -> str:
    return LAYOUTS[layout][2].replace("?", name)


def find_score_letters(layout: str) -> str:
    """The axes of scores, those of heads before the others."""
    return find_letters(layout, "").replace("d", "qk")


def score_by_einsum(q: Tensor, k: Tensor, layout: str) -> Tensor:
    return torch.einsum(f"{find_letters(layout, 'q')},{find_letters(layout, 'k')}->{find_score_letters(layout)}", q, k)


def score_by_matrices(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, str], Tensor]:
    """Multiply tokens (n, t, d) of all heads in one axis."""

    def score(q: Tensor, k: Tensor, layout: str) -> Tensor:
        q, k = put_tokens_last(q, layout), put_tokens_last(k, layout)
        return multiply(q.flatten(0, -3), k.flatten(0, -3).mT).view(*q.shape[:-1], k.shape[-2])

    return score


PRODUCTS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "@": lambda q, k, layout: put_tokens_last(q, layout) @ put_tokens_last(k, layout).mT,
    "matmul": lambda q, k, layout: torch.matmul(put_tokens_last(q, layout), put_tokens_last(k, layout).transpose(-1, -2)),
    "einsum": score_by_einsum,
    "keys first": lambda q, k, layout: (put_tokens_last(k, layout) @ put_tokens_last(q, layout).mT).transpose(-1, -2),
    "bmm": score_by_matrices(torch.bmm),
    "baddbmm": score_by_matrices(lambda q, k: torch.baddbmm(q.new_zeros(1), q, k, beta=0)),
    "tensordot": lambda q, k, layout: torch.tensordot(q, k, ([1], [1])),
    "linear": lambda q, k, layout: F.linear(q, k),
    "mm": lambda q, k, layout: torch.mm(q, k.t()),
}
OF_MATRICES, OF_BATCHES = ("tensordot", "linear", "mm", "addmm"), ("bmm", "baddbmm")

SCALES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], float, float | None]] = {
    # of queries, of scores, the scale beside the recorded queries and keys, and the softcap
    "none": (lambda q: q, lambda s: s, 1.0, None),
    "divided": (lambda q: q, lambda s: s / math.sqrt(D), SCALE, None),
    "multiplied": (lambda q: q, lambda s: s.mul(SCALE), SCALE, None),
    "of the queries": (lambda q: q * SCALE, lambda s: s, 1.0, None),
    "a softcap": (lambda q: q, lambda s: SOFTCAP * torch.tanh(s * SCALE / SOFTCAP), SCALE, SOFTCAP),
}


def find_distances(t: int) -> Tensor:
    """The distance (t, t) of each key behind its query."""
    return torch.arange(t) - torch.arange(t).unsqueeze(-1)


def hide(is_hidden: Tensor, number: float) -> Tensor:
    return torch.zeros(is_hidden.shape).masked_fill(is_hidden, number)


def spread(rows: Tensor, layout: str) -> Tensor:
    """Numbers (b, k) or (h, q, k) of sentences or heads, in the axes of scores."""
    count = (B, H)[is_of_heads := rows.dim() == 3]
    if layout in ONE_HEAD:
        rows = rows[:1] if is_of_heads else rows.unsqueeze(1)
        return rows[0] if layout == "one sentence" else rows
    if layout.startswith("heads "):
        rows = rows if is_of_heads else rows[:, None, None]
        if layout != "heads in the batch":
            return rows
    rows = rows.view(count, -1, rows.shape[-1])
    is_outer = is_of_heads == (layout == "the batch in heads")
    return rows.repeat_interleave(B * H // count, 0) if is_outer else rows.repeat(B * H // count, 1, 1)


def find_padding(s: Tensor, layout: str) -> Tensor:
    return spread(torch.arange(s.shape[-1]) >= torch.tensor([s.shape[-1] - 2, s.shape[-1]])[:, None], layout)


def find_later(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-1], s.shape[-1]).triu(1).bool()


def find_outside(s: Tensor) -> Tensor:
    return (find_distances(s.shape[-1]) > 0) | (find_distances(s.shape[-1]) < -LEFT)


MASKS: dict[str, tuple[Callable[[Tensor, str], Tensor], object]] = {  # of scores, and the rule that is inferred
    "none": (lambda s, layout: s, Everything()),
    "filled": (lambda s, layout: s.masked_fill(find_later(s), -torch.inf), Causal()),
    "where": (lambda s, layout: torch.where(find_later(s), torch.tensor(-torch.inf), s), Causal()),
    "added": (lambda s, layout: s + torch.full((s.shape[-1],) * 2, -torch.inf).triu(1), Causal()),
    "a finite number": (lambda s, layout: s + hide(find_later(s), -1e9), Causal()),
    "the smallest number": (lambda s, layout: s.masked_fill(find_later(s), torch.finfo(s.dtype).min), Causal()),
    "a window": (lambda s, layout: s.masked_fill(find_outside(s), -torch.inf), Causal() & Window(left=LEFT)),
    "padding": (lambda s, layout: s.masked_fill(find_padding(s, layout), -torch.inf), Given),
    "added padding": (lambda s, layout: s + hide(find_padding(s, layout), torch.finfo(s.dtype).min), Given),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1)
TABLE = torch.linspace(0, 99, H * 32, dtype=torch.float64).sin().view(H, 32)
BIASES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "none": lambda s, layout: s,
    "ALiBi": lambda s, layout: s + spread(SLOPES * find_distances(s.shape[-1]), layout),
    "a table of distances": lambda s, layout: s + spread(TABLE[:, find_distances(s.shape[-1]) + 2 * T], layout),
    "a row of keys": lambda s, layout: s + spread(torch.linspace(0, 2, B * s.shape[-1]).view(B, -1).cos(), layout),
}


def subtract_largest(s: Tensor) -> Tensor:
    return (s - s.amax(-1, keepdim=True)).exp()


def divide(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


SOFTMAXES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # of scores, and whether the context is divided by sums
    "Tensor.softmax": (lambda s: s.softmax(-1), False),
    "F.softmax": (lambda s: F.softmax(s, dim=-1), False),
    "nn.Softmax": (nn.Softmax(-1), False),
    "over rows": (lambda s: torch.softmax(s.mT, -2).mT, False),
    "exponentials": (lambda s: divide(s.exp()), False),
    "exponentials less the largest": (lambda s: divide(subtract_largest(s)), False),
    "divided after the product": (subtract_largest, True),
    "powers of 2": (lambda s: divide(torch.exp2(s / math.log(2))), False),
    "logarithms": (lambda s: s.log_softmax(-1).exp(), False),
    "logsumexp": (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(), False),
    "with dropout that is off": (lambda s: F.dropout(s.softmax(-1), 0.3, training=False), False),
}


DIVIDED = [SOFTMAXES[name][0] for name in ("exponentials", "exponentials less the largest", "powers of 2")]


def weigh_by_einsum(w: Tensor, v: Tensor, layout: str) -> Tensor:
    return torch.einsum(f"{find_score_letters(layout)},{find_letters(layout, 'k')}->{find_letters(layout, 'q')}", w, v)


def weigh(multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, str], Tensor]:
    return lambda w, v, layout: put_tokens_last(multiply(w, put_tokens_last(v, layout)), layout)


VALUES: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "@": weigh(torch.matmul),
    "einsum": weigh_by_einsum,
    "values first": weigh(lambda w, v: (v.mT @ w.mT).mT),
    "bmm": weigh(lambda w, v: torch.bmm(w.flatten(0, -3), v.flatten(0, -3)).view(v.shape)),
    "sums": weigh(lambda w, v: (w.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)),
    "tensordot": weigh(lambda w, v: torch.tensordot(w, v, 1)),
    "linear": weigh(lambda w, v: F.linear(w, v.T)),
    "addmm": weigh(lambda w, v: torch.addmm(v.new_zeros(1), w, v)),
}
AXES = {
    "product": PRODUCTS,
    "layout": LAYOUTS,
    "scale": SCALES,
    "bias": BIASES,
    "mask": MASKS,
    "softmax": SOFTMAXES,
    "values": VALUES,
}


def is_possible(case: dict[str, str]) -> bool:
    """Some functions multiply two matrices alone, and others batches of them."""
    products = case["product"], case["values"]
    return not any(one in (OF_BATCHES if case["layout"] == "one sentence" else OF_MATRICES) for one in products)


def list_cases() -> list[dict[str, str]]:
    """Draw cases until each possible pair of values of two axes is in one, always the same."""
    left = {
        (pair, values) for pair in itertools.combinations(AXES, 2) for values in itertools.product(*(AXES[x] for x in pair))
    }
    draw, cases = random.Random(7), []

    def find_pairs(case: dict[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        return {(pair, (case[pair[0]], case[pair[1]])) for pair in itertools.combinations(AXES, 2)} & left

    while left:
        pair, values = min(left)
        drawn = [{name: draw.choice([*AXES[name]]) for name in AXES} | dict(zip(pair, values, strict=True)) for _ in range(300)]
        if possible := [case for case in drawn if is_possible(case)]:
            cases.append(max(possible, key=lambda case: len(find_pairs(case))))
            left -= find_pairs(cases[-1])
        left.discard((pair, values))
    return cases


CASES = {"-".join(case.values()): case for case in list_cases()}


class Spelled(nn.Module):
    """Attention of one spelling; `values` are those of its last forward, (b, h, t, d)."""

    def __init__(self, case: dict[str, str]) -> None:
        super().__init__()
        self.case, self.heads = case, 1 if case["layout"] in ONE_HEAD else H
        self.project, self.softmax = nn.Linear(C, 3 * self.heads * D), SOFTMAXES[case["softmax"]][0]

    def forward(self, x: Tensor) -> Tensor:
        case, (put, back, _) = self.case, LAYOUTS[self.case["layout"]]
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, D)).unbind(-3)
        self.values = v.detach().transpose(1, 2)
        scale_queries, scale_scores, *_ = SCALES[case["scale"]]
        s = scale_scores(PRODUCTS[case["product"]](scale_queries(put(q)), put(k), case["layout"]))
        w = self.softmax(MASKS[case["mask"]][0](BIASES[case["bias"]](s, case["layout"]), case["layout"]))
        context = VALUES[case["values"]](w, put(v), case["layout"])
        if SOFTMAXES[case["softmax"]][1]:
            context = context / put_tokens_last(w.sum(-1, keepdim=True), case["layout"])
        return back(context).flatten(2)


def build_model(case: dict[str, str]) -> nn.Module:
    model = nn.Sequential(nn.Linear(C, C), nn.ModuleDict({"attn": Spelled(case)}))
    model.forward = lambda x: model[1]["attn"](model[0](x))
    return model


def has_formula(case: dict[str, str]) -> bool:
    """The softcap of scores whose exponentials are divided before the product is not known: the weights are stored."""
    return case["scale"] != "a softcap" or SOFTMAXES[case["softmax"]][0] not in DIVIDED


@pytest.mark.parametrize("name", CASES)
def test_each_spelling_is_recorded_by_its_formula_as_the_weights_of_its_output(name):
    torch.manual_seed(3)
    case, sizes = CASES[name], []
    model, b = build_model(case), 1 if case["layout"] == "one sentence" else B
    for t in (T, 2 * T):
        x = torch.randn(b, t, C)
        recording, output = record_and_compare(model, lambda m, x=x: m(x))
        (call,) = recording.calls
        assert (call.name, call.kind) == ("1.attn", "self")
        part = model[1]["attn"]
        weights = output.unflatten(-1, (part.heads, D)).transpose(1, 2) @ torch.linalg.pinv(part.values)
        torch.testing.assert_close(call.map.dense(), weights, rtol=0, atol=EQUAL)
        if not has_formula(case):
            assert ["its weights are stored as they are" in note for note in recording.notes] == [True]
            return
        assert not recording.notes
        sizes.append(call.map.nbytes)
        request, mask, (scale, softcap) = call.map.planes.request, MASKS[case["mask"]][1], SCALES[case["scale"]][2:]
        assert isinstance(request.mask, Given) if mask is Given else request.mask == mask
        assert (request.scale, request.softcap or 0) == pytest.approx((scale, softcap or 0), rel=EQUAL)
    assert sizes[1] <= 2 * sizes[0] + 8 * H  # memory that grows with the length: of 2 t - 1 distances, and no pairs


def test_the_cases_have_each_value_of_each_axis():
    assert all({case[name] for case in CASES.values()} == set(values) for name, values in AXES.items())
    assert 60 <= len(CASES) <= 150
