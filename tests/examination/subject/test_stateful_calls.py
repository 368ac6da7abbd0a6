"""A layer that remembers is asked as if it were new each time, and what it remembers is told apart from a cache."""

import pytest
import torch
from torch import nn

import regard

C = 12


class Projected(nn.Module):
    """Three projections."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(C, C, bias=False) for _ in range(3))
        self.begin()

    def begin(self):
        """What it keeps."""

    def attend(self, q, k, v):
        hidden = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
        return (q @ k.mT / C**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def forward(self, x):
        return self.attend(self.query(x), self.key(x), self.value(x))


class Cached(Projected):
    """Keys and values of earlier calls, in attributes."""

    def begin(self):
        self.held = []

    def attend(self, q, k, v):
        self.held.append((k, v))
        return super().attend(q, *(torch.cat(parts, 1) for parts in zip(*self.held, strict=True)))


class Written(Projected):
    """The same, written in buffers."""

    def begin(self):
        self.register_buffer("keys", torch.zeros(8, 300, C))
        self.register_buffer("values", torch.zeros(8, 300, C))
        self.count = 0

    def attend(self, q, k, v):
        b, t, _ = q.shape
        self.keys[:b, self.count : self.count + t] = k
        self.values[:b, self.count : self.count + t] = v
        self.count += t
        return super().attend(q, self.keys[:b, : self.count], self.values[:b, : self.count])


class InPlace(Projected):
    """Places added to the input where it stands."""

    def begin(self):
        self.places = nn.Parameter(torch.randn(600, C))

    def forward(self, x):
        x += self.places[: x.shape[1]]
        return super().forward(x)


class Wiped(Cached):
    """A cache with a method whose name says nothing, and that needs the number of sequences."""

    begin = Projected.begin

    def __init__(self):
        super().__init__()
        self.held = []

    def fresh(self, sequences):
        assert sequences > 0
        self.held = []


class Argument(Wiped):
    """The same with an argument in place of the method."""

    fresh = None

    def forward(self, x, first=False):
        if first:
            self.held = []
        return super().forward(x)


class Switch(Wiped):
    """The same with an attribute that turns the cache off."""

    fresh = None

    def __init__(self):
        super().__init__()
        self.streams = True

    def attend(self, q, k, v):
        if not self.streams:
            self.held = []
        return super().attend(q, k, v)


class NothingEmpties(Wiped):
    """Names of a cache that is emptied, and nothing that empties it."""

    fresh = None

    def reset_parameters(self):
        for one in self.parameters():
            nn.init.normal_(one)

    def clear_cache(self):
        return len(self.held)

    def forward(self, x, start_pos=0, use_cache=True):
        return super().forward(x)


class Held:
    """Keys and values in an object that is no module."""

    def __init__(self):
        self.pairs = []


class Emptied(Held):
    def drop(self):
        self.pairs = []


class Stored(Projected):
    """A cache in such an object."""

    make = Emptied

    def __init__(self):
        super().__init__()
        self.store = self.make()

    def attend(self, q, k, v):
        self.store.pairs.append((k, v))
        return super().attend(q, *(torch.cat(parts, 1) for parts in zip(*self.store.pairs, strict=True)))


class StoredForever(Stored):
    """The object has no method that empties it."""

    make = Held


@pytest.mark.slow
@pytest.mark.parametrize("make", [Cached, Written])
def test_a_cache_is_distinguished_from_other_state_and_left_as_it_was(make):
    torch.manual_seed(0)
    layer = make()
    report = regard.examine(layer)
    assert report, str(report)
    assert "the state that it keeps from call to call is a cache" in [one.what for one in report.checked]
    assert "query, key and value are used in their roles" in [one.what for one in report.checked]
    assert not getattr(layer, "held", [])
    assert not any(one.any() for one in layer.buffers())


@pytest.mark.slow
def test_what_writes_to_its_input_is_a_finding_and_all_else_is_examined_with_what_was_given():
    torch.manual_seed(0)
    sample = torch.ones(2, 6, C)
    report = regard.examine(InPlace(), sample=sample)
    assert [one.kind for one in report.findings] == ["changed input"], str(report)
    assert (sample == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "way"), [(Wiped, "fresh(2)"), (Argument, "first=True"), (Switch, "streams = False"), (Stored, "drop()")]
)
def test_a_cache_is_right_if_something_empties_it_whatever_its_name(make, way):
    torch.manual_seed(0)
    report = regard.examine(make())
    assert report, str(report)
    assert [
        one.sensitivity.endswith(f"it is emptied by {way}") for one in report.checked if one.what.endswith("is a cache")
    ] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("make", [NothingEmpties, StoredForever])
def test_a_cache_that_nothing_empties_is_named_whatever_its_names_promise(make):
    torch.manual_seed(0)
    (finding,) = regard.examine(make()).findings
    assert finding.kind == "wrong cache"
    assert "no method or argument empties the cache" in finding.evidence
