"""Random requests of attention for hypothesis: shapes, tensors, settings, and rules beside a plain statement of each."""

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from oracle import Sees
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.mechanism import Mask


@dataclass
class Asked:
    """A request, and the same rule as a function of four indices."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    sees: Sees
    options: dict[str, Any] = field(default_factory=dict)

    def numpy(self):
        options = {name: option for name, option in self.options.items() if name != "offset"}
        plain = {n: o.detach().double().numpy() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
        return [x.detach().double().numpy() for x in (self.q, self.k, self.v)], plain

    def leaves(self) -> list[torch.Tensor]:
        """Everything a gradient may be asked of."""
        floating = [o for o in self.options.values() if isinstance(o, torch.Tensor) and o.is_floating_point()]
        return [x.requires_grad_() for x in (self.q, self.k, self.v, *floating)]


@st.composite
def requests(draw, dtype=torch.float64, longest=9, kinds=("scale", "softcap", "bias", "sinks", "offset")) -> Asked:
    b, g, share = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q, k = draw(st.integers(1, longest)), draw(st.integers(0, longest))
    d, e = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    h = g * share
    torch.manual_seed(draw(st.integers(0, 2**32 - 1)))
    tensors = [torch.randn(*shape, dtype=dtype) for shape in ((b, h, q, d), (b, g, k, d), (b, g, k, e))]
    options: dict[str, Any] = {}
    if "scale" in kinds and draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 0.1, 1.0, 3.0, -0.5]))
    if "softcap" in kinds and draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if "bias" in kinds and draw(st.booleans()):
        options["bias"] = draw(biases(b, h, q, k, dtype))
    if "sinks" in kinds and draw(st.booleans()):
        options["sinks"] = torch.randn(h, dtype=dtype)
    offset: int | torch.Tensor = 0
    if "offset" in kinds and draw(st.booleans()):
        offset = draw(st.integers(-longest, longest) | st.just(torch.randint(-longest, longest, (b,))))
        options["offset"] = offset
    starts = [offset] * b if isinstance(offset, int) else offset.tolist()
    mask, sees = draw(rules(b, h, q, k, starts))
    return Asked(*tensors, mask, sees, options)


@st.composite
def biases(draw, b, h, q, k, dtype) -> torch.Tensor:
    """A bias of any shape that broadcasts, with -inf inside."""
    shape = draw(st.sampled_from([(b, h, q, k), (h, q, k), (1, h, 1, k), (q, k), (q, 1), (k,), (1,)]))
    bias = torch.randn(shape, dtype=dtype)
    return bias.masked_fill(torch.rand(shape) > 0.8, -torch.inf)


def rules(b, h, q, k, starts):
    """A rule with what it means, said again as a function of four indices; joined by & | ~."""
    return st.recursive(simple_rules(b, h, q, k, starts), combine_masks, max_leaves=3)


@st.composite
def simple_rules(draw, b, h, q, k, starts):
    bound = st.none() | st.integers(0, 4)
    kind = draw(st.sampled_from(["everything", "causal", "window", "prefix", "padding", "table", "once", "twice", "given"]))
    if kind == "everything":
        return Everything(), lambda *_: True
    if kind == "causal":
        return Causal(), lambda n, _, i, j: j <= i + starts[n]
    if kind == "window":
        left, right = draw(bound), draw(bound)
        return Window(
            left, right
        ), lambda n, _, i, j: (left is None or i + starts[n] - j <= left) and (right is None or j - i - starts[n] <= right)
    if kind == "prefix":
        first = draw(st.integers(0, k + 2))
        return Prefix(first), lambda n, _, i, j: j < first
    if kind == "padding":
        lengths, side = draw(st.lists(st.integers(0, k + 1), min_size=b, max_size=b)), draw(st.sampled_from(["right", "left"]))
        return Padding(lengths, side), lambda n, _, i, j: j < lengths[n] if side == "right" else j >= k - lengths[n]
    if kind == "table":
        real = torch.rand(b, k) > draw(st.sampled_from([-1, 0.4, 1]))
        return Padding(real), lambda n, _, i, j: bool(real[n, j])
    if kind == "once":
        own = torch.randint(0, 3, draw(st.sampled_from([(k,), (b, k)])))
        ids = own.expand(b, k).tolist()
        return Documents(own), lambda n, _, i, j: 0 <= i + starts[n] < k and ids[n][i + starts[n]] == ids[n][j]
    if kind == "twice":
        asking, answering = torch.randint(0, 3, (q,)), torch.randint(0, 3, (b, k))
        return Documents(asking, answering), lambda n, _, i, j: bool(asking[i] == answering[n, j])
    table = torch.rand(draw(st.sampled_from([(b, h, q, k), (h, q, k), (b, 1, 1, k), (q, k), (q, 1)]))) > 0.4
    full = table.expand(b, h, q, k)
    return Given(table), lambda n, m, i, j: bool(full[n, m, i, j])


def combine_masks(inner):
    return st.one_of(
        st.builds(lambda x, y: (x[0] & y[0], lambda *at: x[1](*at) and y[1](*at)), inner, inner),
        st.builds(lambda x, y: (x[0] | y[0], lambda *at: x[1](*at) or y[1](*at)), inner, inner),
        st.builds(lambda x: (~x[0], lambda *at: not x[1](*at)), inner),
    )
