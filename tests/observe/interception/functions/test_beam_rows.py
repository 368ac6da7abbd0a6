"""The door of a translator's state: the rows that a search keeps are known with the keys that come of them."""

import pytest
import torch

from models.translators import make_translator, pad_sentences, sentences
from regard.observe import record
from regard.observe.interception.functions.beam_rows import find_decoder_keys, find_parent_rows
from regard.observe.interception.thread_state import STATE


@pytest.mark.parametrize("kind", ["additive", "plain", "transformer"])
def test_rows_are_noted_while_someone_watches_and_forgotten_with_their_keys(kind):
    model, rows = make_translator(kind), torch.tensor([1, 0, 1])
    state = model.begin(model.encode(*pad_sentences(sentences(4, 6))))
    _, state = model.read(torch.tensor([5, 5]), state)
    plain = type(state).select_rows
    with record(model) if kind != "plain" else record(torch.nn.Sequential(model)):
        moved = state.select_rows(rows)
        keys = find_decoder_keys(moved)
        assert len(keys) == {"additive": 1, "plain": 0, "transformer": 2}[kind]
        assert all(torch.equal(find_parent_rows((None, (one,))), rows) for one in keys)
        assert all(torch.equal(one, other[rows]) for one, other in zip(keys, find_decoder_keys(state), strict=True))
        assert find_parent_rows((torch.ones(2), None)) is None
        del moved, keys
        assert not len(STATE.parent_rows)
    assert type(state).select_rows is plain
    assert not len(STATE.parent_rows)
    state.select_rows(rows)
    assert not len(STATE.parent_rows)
