"""RowMeasures: what policies keep in every row of a layer, and how far away what they drop is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.mechanism.scores import score_dtype
from regard.policies import AttentionInputs

LEAST_DROPPED = 1e-4  # share of a row's weight: of less, a float32 has no digits left


@dataclass(frozen=True, eq=False)
class RowMeasures:
    """What some policies keep in every row: recall, KL in nats, error of the output and number of keys, (policy, b, h, q).

    dropped_distance is the mean distance from the query of what is dropped, in tokens, NaN where it is less than LEAST_DROPPED.
    """

    recall: Tensor
    kl: Tensor
    output_error: Tensor
    kept: Tensor  # int32
    dropped_distance: Tensor

    @classmethod
    def measure_complete_rows(cls, inputs: AttentionInputs, policies: int) -> "RowMeasures":
        """Return the measures of rows that keep every key, for a number of policies."""
        b, h, t, _ = inputs.q.shape
        shape, dtype = (policies, b, h, t), score_dtype(inputs.q.dtype)
        first, stop = map(torch.from_numpy, inputs.find_key_ranges())
        kept = (stop - first).to(inputs.q.device).expand(shape).clone()
        zeros = inputs.q.new_zeros(shape, dtype=dtype)
        return cls(torch.ones_like(zeros), zeros, zeros.clone(), kept, torch.full_like(zeros, torch.nan))
