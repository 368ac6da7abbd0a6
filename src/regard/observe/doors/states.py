"""Interception of a translator's state: which rows a beam search keeps, where the keys of the next step cannot show it.

Rows of one sentence attend to the same source, and two that end in the same word may have the same last key.
"""

import sys
from typing import Any

from torch import Tensor

from regard.observe.doors.lineage import tensors
from regard.observe.doors.names import Patch
from regard.observe.doors.scene import SCENE

MODULES = ("regard.models.recurrent", "regard.models.transformer")


def patches() -> list[Patch]:
    """Return the attribute patches for `State.rows` of the translators that the program has imported."""
    found = [getattr(sys.modules.get(name), "State", None) for name in MODULES]
    return [(state, "rows", noting(vars(state)["rows"])) for state in found if state is not None]


def noting(rows: Any) -> Any:
    """Return the method that selects a state's rows, wrapped to remember the selection with the resulting keys."""

    def noted(self: Any, index: Tensor) -> Any:
        state = rows(self, index)
        for keys in keys_of(state) if SCENE.watchers else ():
            SCENE.turned[keys] = index
        return state

    return noted


def keys_of(state: Any) -> list[Tensor]:
    """Return the keys of a decoder's next step: an RNN's of the source, a Transformer's of the targets so far."""
    return [keys for keys, _ in state.targets] if hasattr(state, "targets") else tensors([state.keys], {})


def turned(args: Any) -> Tensor | None:
    """Return the parent rows of a module's arguments in the previous step, if its keys are remembered; else None."""
    return next((SCENE.turned[x] for x in tensors(args, {}) if x in SCENE.turned), None) if SCENE.turned else None
