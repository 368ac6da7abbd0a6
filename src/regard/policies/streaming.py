"""Policies that read the first keys and the last ones: StreamingLLM, and DuoAttention, which spares some heads."""

from dataclasses import dataclass

import torch

from regard.errors import ConfigError, OutOfRangeError
from regard.mechanism.arguments import check_count, check_sequence, describe_value
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.masks import Given, Prefix, Window
from regard.policies.attention_inputs import AttentionInputs
from regard.policies.budget import HeadBudget, check_amount, count_amount
from regard.policies.policy import Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Read the first `sinks` keys and the last `window`, the query's own among them, at every query.

    A `budget`, a number of keys or a share of the prompt, sets the window to what it leaves after the sinks. Positions are
    those of the text; the paper counts them within the cache. Source: Xiao et al. 2023 (StreamingLLM), section 3.2.
    """

    sinks: int = 4
    window: int = 252
    budget: HeadBudget | None = None

    def __post_init__(self) -> None:
        check_count("StreamingLLM(sinks)", self.sinks, 0)
        check_count("StreamingLLM(window)", self.window)
        if self.budget is not None:
            check_amount("StreamingLLM(budget)", self.budget)

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        window = self.window
        if self.budget is not None:
            window = count_amount(self.budget, inputs.prompt) - self.sinks
            if window < 1:
                raise ConfigError(
                    f"{self.label} leaves no window after its {self.sinks} sinks, for a prompt of {inputs.prompt:,} tokens. "
                    "Pass a larger budget, or fewer sinks."
                )
        recent = Window(left=window - 1)
        return recent | Prefix(self.sinks) if self.sinks else recent


@dataclass(frozen=True)
class DuoAttention(Policy):
    """Read every key in the retrieval heads, and in all other heads the first `sinks` and the last `window`.

    retrieval has the pairs (layer, head) of the retrieval heads. Source: Xiao et al. 2024 (DuoAttention), which learns them;
    `regard heads --model NAME --haystack FILE` measures which heads retrieve.
    """

    retrieval: tuple[tuple[int, int], ...] = ()
    sinks: int = 4
    window: int = 252

    def __post_init__(self) -> None:
        for pair in check_sequence("DuoAttention(retrieval)", self.retrieval):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConfigError(
                    f"DuoAttention(retrieval) must be pairs (layer, head), as in ((3, 1), (5, 0)); got {describe_value(pair)}."
                )
            for number in pair:
                check_count("a layer or head of DuoAttention(retrieval)", number, 0)
        object.__setattr__(self, "retrieval", tuple(self.retrieval))
        StreamingLLM(self.sinks, self.window)  # raises what it refuses

    def choose_keys(self, inputs: AttentionInputs) -> Mask:
        whole = torch.zeros(1, inputs.q.shape[1], 1, 1, dtype=torch.bool, device=inputs.q.device)
        for layer, head in self.retrieval:
            if layer == inputs.layer:
                if head >= whole.shape[1]:
                    raise OutOfRangeError(f"DuoAttention(retrieval) has head {head}, but layer {layer} has {whole.shape[1]}.")
                whole[:, head] = True
        if whole.all():
            return EVERYTHING
        near = StreamingLLM(self.sinks, self.window).choose_keys(inputs)
        return near | Given(whole) if whole.any() else near
