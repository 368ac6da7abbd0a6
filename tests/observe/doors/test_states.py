"""The door of a translator's state: the rows that a search keeps are known with the keys that come of them."""

import pytest
import torch

from models.translators import made, padded, sentences
from regard.observe import record
from regard.observe.doors.scene import SCENE
from regard.observe.doors.states import keys_of, turned


@pytest.mark.parametrize("kind", ["additive", "plain", "transformer"])
def test_rows_are_noted_while_someone_watches_and_forgotten_with_their_keys(kind):
    model, rows = made(kind), torch.tensor([1, 0, 1])
    state = model.begin(model.encode(*padded(sentences(4, 6))))
    _, state = model.read(torch.tensor([5, 5]), state)
    plain = type(state).rows
    with record(model) if kind != "plain" else record(torch.nn.Sequential(model)):
        moved = state.rows(rows)
        keys = keys_of(moved)
        assert len(keys) == {"additive": 1, "plain": 0, "transformer": 2}[kind]
        assert all(torch.equal(turned((None, (one,))), rows) for one in keys)
        assert all(torch.equal(one, other[rows]) for one, other in zip(keys, keys_of(state), strict=True))
        assert turned((torch.ones(2), None)) is None
        del moved, keys
        assert not len(SCENE.turned)
    assert type(state).rows is plain
    assert not len(SCENE.turned)
    state.rows(rows)
    assert not len(SCENE.turned)
