"""Policies that compress the cache once, after the prompt: SnapKV, ObservedAttention, Knorm and ExpectedAttention."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count, check_number
from regard.mechanism.heads import share
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.scores import default_scale, score_dtype
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import count_keys
from regard.policies.policy import PromptPolicy, require_prompt


@dataclass(frozen=True)
class SnapKV(PromptPolicy):
    """Keep the keys that the last `window` queries of the prompt attend to most, and the window itself.

    The weights are averaged over the window, smoothed over `kernel` keys, and averaged over the query heads of a key head.
    budget counts the window. Source: Li et al. 2024 (SnapKV); smoothing by the mean, as in kvpress.
    """

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("SnapKV(window)", self.window)
        if check_count("SnapKV(kernel)", self.kernel) % 2 == 0:
            raise ConfigError(f"SnapKV(kernel) must be odd, so that a key is in the middle; got {self.kernel}.")

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, 2)
        least = int(count_keys(self.budget, inputs.prompt, inputs.layer, inputs.k.shape[1]).min())
        most = min(least, inputs.prompt - 1)
        if self.window > most:
            raise ConfigError(
                f"{self.label} keeps {min(least, inputs.prompt):,} keys of a prompt of {inputs.prompt:,}, not its window of "
                f"{self.window:,} after at least one key: pass a window of at most {most:,}, or a larger budget and prompt."
            )
        return super().choose_keys(inputs)

    def score_keys(self, prompt: AttentionInputs) -> Tensor:
        first = prompt.tokens - self.window
        weights = prompt.build_map(first)[:, :, :, :first].mean(2)  # (b, h, first)
        smooth = F.avg_pool1d(weights, self.kernel, stride=1, padding=self.kernel // 2)
        scores = prompt.average_group(smooth)
        return F.pad(scores, (0, self.window), value=float(scores.max()) + 1)


@dataclass(frozen=True)
class ObservedAttention(PromptPolicy):
    """Keep the keys with the largest mean weight over the queries of the prompt that see them.

    Source: kvpress's ObservedAttentionPress, the selection of H2O (Zhang et al. 2023) made once; here the T x T weights that it
    reads are never stored, and in a sliding window only the queries that have a key in theirs count.
    """

    def score_keys(self, prompt: AttentionInputs) -> Tensor:
        received = prompt.average_group(prompt.sum_weights())  # (b, g, k)
        return received / prompt.count_queries().to(received.device)


@dataclass(frozen=True)
class Knorm(PromptPolicy):
    """Keep the keys with the smallest norm. Source: Devoto et al. 2024, A simple and effective L2 norm based strategy."""

    def score_keys(self, prompt: AttentionInputs) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(prompt.k, dim=-1, dtype=score_dtype(prompt.k.dtype))
        return -norms


@dataclass(frozen=True)
class ExpectedAttention(PromptPolicy):
    """Keep the keys that the mean future query is expected to attend to, weighted by the norm of their values.

    The queries of the prompt after the first `sinks` are taken as a normal distribution with their mean and covariance.
    With a `rotary_base` their rotary positions are undone, and they are turned to the mean of the next `future` positions;
    without one they are used as they are. The first `sinks` keys are kept, or as many as the budget has.
    Source: Devoto et al. 2025 (Expected Attention), as in kvpress.
    """

    sinks: int = 4
    future: int = 512
    rotary_base: float | None = None
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("ExpectedAttention(sinks)", self.sinks, 0)
        check_count("ExpectedAttention(future)", self.future)
        if self.rotary_base is not None and not check_number("ExpectedAttention(rotary_base)", self.rotary_base) > 1:
            raise ConfigError(f"ExpectedAttention(rotary_base) must be above 1, such as 10000; got {self.rotary_base}.")
        if not 0 <= check_number("ExpectedAttention(epsilon)", self.epsilon) < math.inf:
            raise ConfigError(f"ExpectedAttention(epsilon) must be at least 0 and finite; got {self.epsilon}.")

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        require_prompt(self, inputs, self.sinks + 2, ", or fewer sinks")
        return super().choose_keys(inputs)

    def score_keys(self, prompt: AttentionInputs) -> Tensor:
        dtype, first = score_dtype(prompt.q.dtype), self.sinks
        q, k = prompt.q.to(dtype), share(prompt.k.to(dtype), prompt.q.shape[1])[:, :, first:]
        mean, covariance = self.describe_queries(q)
        scale = default_scale(q) if prompt.scale is None else prompt.scale
        scores = (k @ mean.unsqueeze(-1)).squeeze(-1) * scale + ((k @ covariance) * k).sum(-1) * scale**2 / 2
        sizes = torch.linalg.vector_norm(prompt.require_values("ExpectedAttention")[:, :, first:], dim=-1)
        expected = (prompt.average_group(scores.softmax(-1)) + self.epsilon) * sizes
        ranks = torch.arange(1, first + 1, dtype=expected.dtype, device=expected.device)
        most = torch.finfo(expected.dtype).max / ranks  # of which a budget below the sinks keeps the first
        return torch.cat([most.expand(*expected.shape[:2], first), expected], -1)

    def describe_queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean (b, h, d) and the covariance (b, h, d, d) of the queries (b, h, t, d), as of future positions."""
        t, d = q.shape[2:]
        if self.rotary_base is not None:
            q = rotate_halves(q, -compute_angles(torch.arange(t), d, self.rotary_base).to(q))
        q = q[:, :, self.sinks :]
        mean = q.mean(2)
        deviation = q - mean.unsqueeze(2)
        covariance = deviation.mT @ deviation / q.shape[2]
        if self.rotary_base is None:
            return mean, covariance
        turn = average_rotation(compute_angles(torch.arange(t, t + self.future), d, self.rotary_base).to(q))
        return mean @ turn.mT, turn @ covariance @ turn.mT


def compute_angles(positions: Tensor, width: int, base: float) -> Tensor:
    """Return the rotary angles (t, d / 2) of positions (t,)."""
    return positions.double().unsqueeze(-1) * base ** (-torch.arange(0, width, 2).double() / width)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (n, n + d / 2) of x (..., t, d) by angles (t, d / 2), as Llama does."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def average_rotation(angles: Tensor) -> Tensor:
    """Return the mean of the rotations by angles (t, d / 2), as a matrix (d, d)."""
    cosines, sines = torch.diag(angles.cos().mean(0)), torch.diag(angles.sin().mean(0))
    return torch.cat([torch.cat([cosines, -sines], 1), torch.cat([sines, cosines], 1)])
