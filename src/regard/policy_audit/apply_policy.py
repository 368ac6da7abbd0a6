"""ApplyPolicy: run a model with a policy, as a change of regard.intervene."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count
from regard.mechanism.mask_algebra import And, Mask
from regard.mechanism.masks import Given
from regard.observe.attention_changes import Change
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.recorded_runs.run import IMPLICIT
from regard.observe.recording import Recording
from regard.policies import AttentionInputs, Policy
from regard.policies.policy import check_policy
from regard.policy_audit.policy_context import compute_policy_context
from regard.policy_audit.recorded_inputs import join_inputs, make_inputs, read_inputs


@dataclass(eq=False, kw_only=True)
class PolicyCall(AttentionCall):
    """A call that changes of policies have restricted, with the mask that it had before the first of them."""

    own_mask: Mask
    policies: tuple["ApplyPolicy", ...]


@dataclass(frozen=True, eq=False)
class ApplyPolicy(Change):
    """Let each query use only the keys that a policy chooses, from the queries and keys of this very forward.

    The first `prompt` tokens are read at once; the model reads the whole text in one forward, whose later queries then see what
    the cache would have held. In float32 on a CPU the context is computed by the compiled passes of an audit,
    which read the kept keys alone, else by the fastest kernel. layer and head select, as in other changes; all by default.
    Of several policies for one head each chooses from all keys that the model lets a query see, and the query uses those that
    all of them chose; one of them at most may change keys and values.
    With `context`, a recording of the prompt with its values, the model reads the later tokens alone, with the prompt in its
    cache: the queries of the prompt stay as they were recorded, which needs a policy that `reads_whole_prompt`.
    """

    computes_context = True
    policy: Policy
    prompt: int
    context: Recording | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == IMPLICIT:
            raise ConfigError("ApplyPolicy chooses keys of a softmax: use it for layers of the kind 'self' or 'cross'.")
        check_policy(self.policy)
        check_count("prompt", self.prompt)
        if self.context is not None and not self.policy.reads_whole_prompt:
            raise ConfigError(
                f"{self.policy.label} changes what the queries of the prompt read, so that a prompt in the cache would be that "
                "of another model. Leave context out and run the model on the whole text."
            )

    @property
    def has_cache(self) -> bool:
        """Whether the policy changes keys and values."""
        return type(self.policy).change_cache is not Policy.change_cache

    def change_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        own_mask, policies = (call.own_mask, call.policies) if isinstance(call, PolicyCall) else (call.mask, ())
        chosen = self.resolve_heads(call.q.shape[1])
        for other in policies if self.has_cache else ():
            both = sorted({*chosen} & {*other.resolve_heads(call.q.shape[1])}) if other.has_cache else []
            if both:
                raise ConfigError(
                    f"{other.policy.label} and {self.policy.label} both change the keys and values of head {both[0]} of "
                    f"{name}: apply one of them, or each to heads of its own."
                )
        inputs = self.make_inputs(replace(call, mask=own_mask), name, number)
        mask = self.policy.choose_keys(inputs)
        if self.context is not None:
            keys = torch.arange(inputs.tokens, device=inputs.k.device)
            mask = Given(mask.block(keys[self.prompt :], keys))
        if self.head is not None:
            others = torch.ones(1, call.q.shape[1], 1, 1, dtype=torch.bool, device=call.q.device)
            others[:, chosen] = False
            mask = mask | Given(others)
        given = {one.name: getattr(call, one.name) for one in fields(AttentionCall)}
        return PolicyCall(**given | {"mask": call.mask & mask}, own_mask=own_mask, policies=(*policies, self))

    def compute_context(self, changed: AttentionCall, call: AttentionCall, name: str, number: int) -> Tensor | None:
        mask = changed.mask.other if isinstance(changed.mask, And) and changed.mask.one is call.mask else None
        if mask is None or call.dropout or self.context is not None:
            return None
        return compute_policy_context(self.make_inputs(call, name, number), mask)

    def change_context(self, context: Tensor, call: AttentionCall, name: str, number: int) -> Tensor:
        if not self.has_cache:
            return context
        if self.context is None:
            inputs = join_inputs(call, call.v, number, self.prompt)  # whose mask is also that of the policy
        else:
            inputs = self.join_context(call, name, number)
        cache = self.policy.change_cache(inputs)
        if cache is None or self.prompt == inputs.tokens:
            return context
        k, v = cache[0].to(inputs.k.dtype), cache[1].to(context.dtype)
        later = (replace(inputs, k=k).build_map(self.prompt) if self.context is None else call.build_map(k)) @ v
        chosen = self.resolve_heads(context.shape[1])
        found = context.clone()
        found[:, chosen, context.shape[2] - later.shape[2] :] = later[:, chosen]
        return found

    def make_inputs(self, call: AttentionCall, name: str, number: int) -> AttentionInputs:
        """Return what the policy decides from. Raises ConfigError for a text shorter than the prompt."""
        if self.context is not None:
            return self.join_context(call, name, number)
        tokens = call.q.shape[2]
        if self.prompt > tokens:
            raise ConfigError(f"the prompt of ApplyPolicy has {self.prompt:,} tokens, but the text has {tokens:,}.")
        return make_inputs(call, call.v, name, number, self.prompt)

    def join_context(self, call: AttentionCall, name: str, number: int) -> AttentionInputs:
        """Return what the policy decides from where the prompt is in the cache. Raises ConfigError for another prompt."""
        assert self.context is not None
        recorded, new, keys = read_inputs(self.context, number, self.prompt), call.q.shape[2], call.k.shape[2]
        if not recorded.tokens == self.prompt == keys - new:
            raise ConfigError(
                f"the context of ApplyPolicy must be a recording of the prompt of {self.prompt:,} tokens, which is in the "
                f"cache; it has {recorded.tokens:,}, and {name} has {new:,} queries on {keys:,} keys."
            )
        return replace(recorded, q=torch.cat([recorded.q, call.q], 2), k=call.k, v=call.v)
