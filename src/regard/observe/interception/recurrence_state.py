"""The arguments of a recurrence and the sample of its state by which a later call is known to continue it."""

from typing import Any

import torch
from torch import Tensor

Given = dict[str, Any]  # the arguments of a call by name
STATE_NUMBERS = 4096  # numbers of each row's state that are compared between calls


def sample_state(*parts: Tensor | None) -> Tensor | None:
    """Return some numbers (b, n) of a state, copied; None if there is none, or if it is 0, as before the first token."""
    given = [x.detach().flatten(1) for x in parts if x is not None]
    if len(given) < len(parts) or not given[0].any():
        return None
    whole = [x[:, :: max(1, -(-x.shape[1] // STATE_NUMBERS))] for x in given]
    return torch.cat([x.to(whole[0].dtype) for x in whole], 1).clone()
