"""ApplyPolicy: run a model with a policy, as a change of regard.intervene."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import And
from regard.mechanism.masks import Given
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.intervene import Change
from regard.policies import AttentionInputs, Policy
from regard.policies.policy import check_policy
from regard.policy_audit.policy_context import compute_policy_context
from regard.policy_audit.recorded_inputs import join_inputs, make_inputs


@dataclass(frozen=True, eq=False)
class ApplyPolicy(Change):
    """Let each query use only the keys that a policy chooses, from the queries and keys of this very forward.

    The first `prompt` tokens are read at once; the model reads the whole text in one forward, whose later queries then see what
    the cache would have held. In float32 on a CPU the context is computed by the compiled passes of an audit,
    which read the kept keys alone, else by the fastest kernel. layer and head select, as in other changes; all by default.
    """

    policy: Policy
    prompt: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy)
        check_count("prompt", self.prompt)

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        mask = self.policy.choose_keys(self.make_inputs(call, name, number))
        if self.head is not None:
            others = torch.ones(1, call.q.shape[1], 1, 1, dtype=torch.bool, device=call.q.device)
            others[:, self.resolve_heads(call.q.shape[1])] = False
            mask = mask | Given(others)
        return replace(call, mask=call.mask & mask)

    def compute_context(self, changed: AttentionCall, call: AttentionCall, name: str, number: int) -> Tensor | None:
        mask = changed.mask.other if isinstance(changed.mask, And) and changed.mask.one is call.mask else None
        if mask is None or call.dropout:
            return None
        return compute_policy_context(self.make_inputs(call, name, number), mask)

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        if type(self.policy).change_cache is Policy.change_cache:
            return context
        inputs = join_inputs(call, call.v, number, self.prompt)  # the mask is also that of the policy
        cache = self.policy.change_cache(inputs)
        if cache is None or self.prompt == inputs.tokens:
            return context
        later = replace(inputs, k=cache[0].to(inputs.k.dtype)).build_map(self.prompt) @ cache[1].to(context.dtype)
        chosen = self.resolve_heads(context.shape[1])
        found = context.clone()
        found[:, chosen, self.prompt :] = later[:, chosen]
        return found

    def make_inputs(self, call: AttentionCall, name: str, number: int) -> AttentionInputs:
        """Return what the policy decides from. Raises ConfigError for a text shorter than the prompt."""
        tokens = call.q.shape[2]
        if self.prompt > tokens:
            raise ConfigError(f"the prompt of ApplyPolicy has {self.prompt:,} tokens, but the text has {tokens:,}.")
        return make_inputs(call, call.v, name, number, self.prompt)
