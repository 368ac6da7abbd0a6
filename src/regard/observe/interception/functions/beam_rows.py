"""Interception of a translator's state: which rows a beam search keeps, where the keys of the next step cannot show it.

Rows of one sentence attend to the same source, and two that end in the same word may have the same last key.
"""

import sys
from typing import Any

from torch import Tensor

from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.tensor_arguments import find_tensors
from regard.observe.interception.thread_state import STATE

STATES = (("regard.models.recurrent", "RecurrentState"), ("regard.models.transformer", "TransformerState"))


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches for `select_rows` of the states of translators that the program has imported."""
    states = [getattr(sys.modules[module], name) for module, name in STATES if module in sys.modules]
    return [(state, "select_rows", wrap_rows(vars(state)["select_rows"])) for state in states]


def wrap_rows(rows: Any) -> Any:
    """Return the method that selects a state's rows, wrapped to remember the selection with the resulting keys."""

    def select_rows(self: Any, index: Tensor) -> Any:
        state = rows(self, index)
        for keys in find_decoder_keys(state) if STATE.watchers else ():
            STATE.parent_rows[keys] = index
        return state

    return select_rows


def find_decoder_keys(state: Any) -> list[Tensor]:
    """Return the keys of a decoder's next step: an RNN's of the source, a Transformer's of the targets so far."""
    return [keys for keys, _ in state.targets] if hasattr(state, "targets") else find_tensors([state.keys], {})


def find_parent_rows(args: Any) -> Tensor | None:
    """Return the parent rows of a module's arguments in the previous step, if its keys are remembered; else None."""
    return (
        next((STATE.parent_rows[x] for x in find_tensors(args, {}) if x in STATE.parent_rows), None)
        if STATE.parent_rows
        else None
    )
