"""Quantised: the keys and values of the prompt rounded to a few bits, in groups."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.scores import score_dtype
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.policy import Policy, require_prompt


@dataclass(frozen=True)
class Quantised(Policy):
    """Round the keys and values of the prompt to `bits` bits, each group from its smallest to its largest number.

    Keys are rounded feature by feature in groups of `group` tokens, values token by token in groups of `group` features. The
    tokens after the last complete group of the prompt, and later ones, stay as they are. Every key is used. Source: Liu et al.
    2024 (KIVI), section 3.
    """

    bits: int = 4
    group: int = 32
    reads_whole_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("Quantised(bits)", self.bits, 1, 16)
        check_count("Quantised(group)", self.group)

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 0)
        return EVERYTHING

    def change_cache(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        end = inputs.prompt // self.group * self.group
        k, v = inputs.k.to(score_dtype(inputs.k.dtype)).clone(), inputs.require_values("Quantised").clone()
        k[:, :, :end] = self.round_groups(k[:, :, :end].mT).mT  # along the tokens of a feature
        v[:, :, :end] = self.round_groups(v[:, :, :end])
        return k, v

    def round_groups(self, x: Tensor) -> Tensor:
        """Round x (..., n) to 2 ** bits levels in each group of its last axis; the last group may be smaller."""
        n = x.shape[-1]
        padded = F.pad(x, (0, -n % self.group), value=float("nan"))
        padded = padded.view(*x.shape[:-1], padded.shape[-1] // self.group, self.group)
        low, high = padded.nan_to_num(float("inf")).amin(-1, True), padded.nan_to_num(float("-inf")).amax(-1, True)
        step = (high - low) / (2**self.bits - 1)
        levels = ((padded - low) / step.masked_fill(step == 0, 1)).round()
        rounded: Tensor = (levels * step + low).flatten(-2)
        return rounded[..., :n]
