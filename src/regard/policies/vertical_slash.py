"""VerticalSlash: the columns and the diagonals to which the end of the prompt attends."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import Mask
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.key_masks import Lines
from regard.policies.policy import Policy, require_prompt


@dataclass(frozen=True)
class VerticalSlash(Policy):
    """Read, in the prompt, the `vertical` columns and the `slash` diagonals to which its last queries attend most.

    The weights of the `last` queries of the prompt are summed over each key, and over each distance of query and key. A query
    always reads its own key; queries after the prompt read every key. Source: Jiang et al. 2024 (MInference), algorithm 2.
    """

    vertical: int = 256
    slash: int = 256
    last: int = 64

    def __post_init__(self) -> None:
        for name in ("vertical", "slash", "last"):
            check_count(f"VerticalSlash({name})", getattr(self, name))

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, self.last)
        prompt = inputs.select_prompt()
        first = prompt.tokens - self.last
        weights = prompt.build_map(first)[...]  # (b, h, last, prompt)
        rows = torch.arange(first, prompt.tokens, device=weights.device).view(-1, 1)
        back = (rows - torch.arange(prompt.tokens, device=weights.device)).clamp(min=0).expand_as(weights)
        by_distance = weights.new_zeros(*weights.shape[:2], prompt.tokens)
        by_distance.scatter_add_(2, back.flatten(2), weights.flatten(2))  # keys after their query have weight 0
        by_distance[:, :, 0] = torch.inf
        columns = mark_largest(weights.sum(2), self.vertical, inputs.tokens)
        return Lines(columns, mark_largest(by_distance, self.slash, inputs.tokens), inputs.prompt)


def mark_largest(x: Tensor, n: int, size: int) -> Tensor:
    """Mark the n largest numbers of x (b, h, t), as a bool (b, h, size) whose rest is False."""
    found = torch.zeros(*x.shape[:2], size, dtype=torch.bool, device=x.device)
    return found.scatter_(2, x.topk(min(n, x.shape[2])).indices, True)
