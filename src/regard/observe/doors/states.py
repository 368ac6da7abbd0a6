"""The door of a translator's state: which of its rows a search keeps, where the keys of the next step cannot tell.

Rows of one sentence look at the same source, and two that end in the same word may have the same last key.
"""

import sys
from typing import Any

from torch import Tensor

from regard.observe.doors.lineage import tensors
from regard.observe.doors.names import Patch
from regard.observe.doors.scene import SCENE

MODULES = ("regard.models.recurrent", "regard.models.transformer")


def patches() -> list[Patch]:
    """What stands in for the choice of a state's rows, in the models that the program has imported."""
    found = [getattr(sys.modules.get(name), "State", None) for name in MODULES]
    return [(state, "rows", noting(vars(state)["rows"])) for state in found if state is not None]


def noting(rows: Any) -> Any:
    """The choice of rows, which is remembered with the keys that come of it."""

    def noted(self: Any, index: Tensor) -> Any:
        state = rows(self, index)
        for keys in keys_of(state) if SCENE.watchers else ():
            SCENE.turned[keys] = index
        return state

    return noted


def keys_of(state: Any) -> list[Tensor]:
    """The keys that a decoder's next step is handed: an RNN's of the source, a Transformer's of the targets it has read."""
    return [keys for keys, _ in state.targets] if hasattr(state, "targets") else tensors([state.keys], {})


def turned(args: Any) -> Tensor | None:
    """The rows of the step before that a module's arguments are of, where its keys are among those remembered."""
    return next((SCENE.turned[x] for x in tensors(args, {}) if x in SCENE.turned), None) if SCENE.turned else None
