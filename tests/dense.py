"""What detectors ask, answered from the whole matrix by plain loops; and a recording made of maps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from regard import AttentionMap, attend
from regard.observe.recorded_runs.words import select_axis_words
from regard.observe.recording import Recording
from strategies import Asked


class Recorded(Recording):
    """A recording by what is asked of one."""

    names: Any = ()
    histories: Mapping[Any, Any] = MappingProxyType({})  # a map is what it is given, not joined from calls
    __setattr__ = object.__setattr__

    def __init__(self, maps, tokens=None, values=None, names=None):
        self.maps, self.tokens, self.kept = maps, tokens, values
        self.names = names or [f"layer.{n}" for n in range(len(maps))]

    @property
    def last(self):
        return self

    def heads(self, layer, kind="self", part=None):
        return tuple(range(self.map(layer, kind=kind, part=part).shape[1]))

    def layers(self, kind="self", part=None):
        return [] if kind == "implicit" else self.names

    def words(self, layer, kind="self", part=None):
        return select_axis_words(self.tokens, kind, self.names[self.number(layer)])

    def find_gap(self, layers, part):
        return None

    def number(self, layer):
        return layer if isinstance(layer, int) else self.names.index(layer)

    def map(self, layer, head=None, kind="self", part=None):
        found = self.maps[self.number(layer)]
        return found if head is None else found.select(heads=[head])

    def values(self, layer, kind="self", part=None):
        return None if self.kept is None else self.kept[self.number(layer)]


@dataclass
class Dense:
    """Weights (b, h, q, k) in float64, which keys are visible, and where the queries stand, (b, q)."""

    weights: torch.Tensor
    visible: torch.Tensor
    positions: list[list[int]]

    @property
    def shape(self):
        return tuple(self.weights.shape)

    def counts(self, b, h, i):
        """Whether a query counts: it sees something, and itself, if any query of its batch row and head sees itself."""
        if not bool((self.weights[b, h, i] != 0).any()):
            return False
        return self.sees_itself(b, h, i) or not any(self.sees_itself(b, h, n) for n in range(self.shape[2]))

    def sees_itself(self, b, h, i):
        return self.sees(b, h, i, self.positions[b][i])

    def sees(self, b, h, i, j):
        return 0 <= j < self.shape[3] and bool(self.visible[b, h, i, j])

    def entropy(self, b, h, i):
        return -sum(w * math.log(w) for w in self.weights[b, h, i].tolist() if w)

    def effective_keys(self, b, h, i):
        return math.exp(self.entropy(b, h, i))

    def breadth(self, b, h, i):
        return self.effective_keys(b, h, i) / int(self.visible[b, h, i].sum())

    def queries(self, b, h):
        return [i for i in range(self.shape[2]) if self.counts(b, h, i)]

    def find_first_visible_key(self, b):
        """The first key that the first query that counts may see."""
        _, h, q, k = self.shape
        for i in range(q):
            if any(self.counts(b, head, i) for head in range(h)):
                return min((j for j in range(k) for head in range(h) if self.visible[b, head, i, j]), default=0)
        return 0

    def mean(self, score, among=lambda b, h, i: True):
        """The mean of score(b, h, i) over the queries that count, (b, h); NaN where there is none."""
        b, h, *_ = self.shape
        found = torch.full((b, h), math.nan, dtype=torch.float64)
        for n in range(b):
            for m in range(h):
                scores = [float(score(n, m, i)) for i in self.queries(n, m) if among(n, m, i)]
                if scores:
                    found[n, m] = math.fsum(scores) / len(scores)
        return found


def both(asked: Asked) -> tuple[AttentionMap, Dense]:
    """The map of a request, and the same as a dense matrix."""
    b, h, q, _ = asked.q.shape
    k = asked.k.shape[2]
    weights = attend(asked.q, asked.k, asked.k, asked.mask, **asked.options).weights.double()
    offset: Any = asked.options.get("offset", 0)
    starts = [offset] * b if isinstance(offset, int) else offset.tolist()
    visible = torch.tensor(
        [[[[asked.sees(n, m, i, j) for j in range(k)] for i in range(q)] for m in range(h)] for n in range(b)]
    ).view(b, h, q, k)
    if "bias" in asked.options:
        visible &= asked.options["bias"].expand(b, h, q, k) != -torch.inf
    m = AttentionMap(asked.q, asked.k, asked.mask, **asked.options)
    return m, Dense(weights, visible, [[start + i for i in range(q)] for start in starts])


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(
        found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol, equal_nan=True
    )
