"""A model that runs with a policy computes what the model computes with a compressed cache."""

from dataclasses import dataclass

import pytest
import torch

import regard
from policy_audit.small_models import PROMPT, TOKENS, draw_tokens, make_model, record
from regard import ConfigError, KnockOut
from regard.observe.attention_changes import Change
from regard.policies import H2O, TOVA, Knorm, Oracle, Quantised, Quest, SnapKV, StreamingLLM
from regard.policy_audit import ApplyPolicy


@dataclass(frozen=True, eq=False)
class PutContext(Change):
    """Replace the context of a layer by one that is given."""

    given: torch.Tensor

    def change_context(self, context, call, name, number):
        return self.given


POLICIES = [StreamingLLM(1, 6), H2O(6), TOVA(6), Knorm(6), SnapKV(9, 3), Oracle(4), Quest(8, 4)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_the_weights_of_the_first_layer_are_those_of_the_kept_keys(policy):
    model, tokens = make_model(), draw_tokens()
    complete = record(model, tokens)
    with regard.intervene(model, ApplyPolicy(policy, PROMPT)):
        changed = record(model, tokens)
    audited = regard.audit(complete, policy, prompt=PROMPT)
    t = torch.arange(TOKENS)
    kept = policy.choose_keys(audited.read_inputs(0)).block(t, t)
    weights = complete.map(0).dense() * kept
    torch.testing.assert_close(changed.map(0).dense(), weights / weights.sum(-1, keepdim=True), rtol=0, atol=1e-12)


def test_the_forward_is_that_of_a_cache_from_which_keys_were_deleted():
    """Knorm's keys of each layer, deleted from the keys and values that the later queries attend to, by hand."""
    model, tokens = make_model(), draw_tokens(1)
    with regard.intervene(model, ApplyPolicy(Knorm(5), PROMPT)):
        changed = record(model, tokens)
    for layer in range(2):
        asked = changed.map(layer).planes.request
        v = changed.values(layer)
        kept = asked.k[:, :, :PROMPT].norm(dim=-1).topk(5, largest=False).indices[0]  # (h, 5)
        context = changed.map(layer) @ v
        for head, places in enumerate(kept):
            places = torch.cat([places.sort().values, torch.arange(PROMPT, TOKENS)])
            for i in range(PROMPT, TOKENS):
                seen = places[places <= i]
                weights = (asked.k[0, head, seen] @ asked.q[0, head, i] * asked.scale).softmax(0)
                torch.testing.assert_close(context[0, head, i], weights @ v[0, head, seen], rtol=0, atol=1e-12)


def test_later_queries_read_the_rounded_cache():
    model, tokens, policy = make_model(), draw_tokens(), Quantised(2, 4)
    plain = record(model, tokens)
    with regard.intervene(model, ApplyPolicy(policy, PROMPT)), torch.no_grad():
        changed = model(tokens)
    k, v = policy.change_cache(regard.audit(plain, policy, prompt=PROMPT).read_inputs(0))
    asked = plain.map(0).planes.request
    context = plain.map(0) @ plain.values(0)
    later = regard.attention(asked.q[:, :, PROMPT:], k, v, regard.Causal(), scale=asked.scale, offset=PROMPT)
    with regard.intervene(model, ApplyPolicy(policy, PROMPT, layer=0)), torch.no_grad():
        first = model(tokens)
    context = torch.cat([context[:, :, :PROMPT], later], 2)
    with regard.intervene(model, PutContext(context, layer=0)), torch.no_grad():
        torch.testing.assert_close(model(tokens), first, rtol=0, atol=1e-10)
    assert not torch.allclose(first, changed)


@pytest.mark.parametrize("is_policy_first", [True, False])
def test_a_head_that_is_knocked_out_stays_so_under_a_policy(is_policy_first):
    model, tokens, contexts = make_model(), draw_tokens(), []
    policy, knockout = ApplyPolicy(Quantised(2, 4), PROMPT, layer=0), KnockOut(layer=0, head=1)

    @dataclass(frozen=True, eq=False)
    class KeepContext(Change):
        """Keep the context of a layer, as the changes before leave it."""

        def change_context(self, context, call, name, number):
            contexts.append(context)
            return context

    for changes in ([policy, knockout] if is_policy_first else [knockout, policy], [policy]):
        with regard.intervene(model, *changes, KeepContext(layer=0)), torch.no_grad():
            model(tokens)
    both, alone = contexts
    assert not both[:, 1].any()
    assert torch.equal(both[:, [0, 2]], alone[:, [0, 2]])


PAIRS = [
    ([Quantised(2, 4), H2O(6)], [None, None]),
    ([H2O(6), StreamingLLM(1, 9)], [None, None]),
    ([Knorm(5), TOVA(6)], [0, [1, 2]]),
    ([Quantised(2, 4), Quantised(4, 5)], [0, 1]),
    ([Quantised(2, 4), Knorm(5)], [[0, 2], [0, 1]]),
]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(("policies", "heads"), PAIRS, ids=str)
def test_of_several_policies_each_chooses_from_what_the_model_computes(policies, heads, is_reversed):
    """A query reads the keys that all policies let it read, as the one that changes the cache left them."""
    model, tokens = make_model(), draw_tokens(batch=1)
    plain = record(model, tokens)
    asked, v = plain.map(0).planes.request, plain.values(0)
    inputs = regard.audit(plain, policies, prompt=PROMPT).read_inputs(0)
    t = torch.arange(TOKENS)
    seen = torch.ones(asked.q.shape[1], TOKENS, TOKENS, dtype=torch.bool).tril()
    keys, values = (x[0].clone() for x in (asked.k, v))  # each query head has its own
    for policy, chosen in zip(policies, heads, strict=True):
        own = range(len(seen)) if chosen is None else [chosen] if isinstance(chosen, int) else chosen
        table, cache = policy.choose_keys(inputs).block(t, t).expand(1, len(seen), -1, -1)[0], policy.change_cache(inputs)
        for head in own:
            seen[head] &= table[head]
            if cache is not None:
                keys[head], values[head] = cache[0][0, head], cache[1][0, head]
    later = (t >= PROMPT).unsqueeze(-1)
    rows = []
    for head, table in enumerate(seen):
        ours, theirs = (
            ((asked.q[0, head] @ k[head].T * asked.scale).masked_fill(~table, -torch.inf).softmax(-1)) @ x[head]
            for k, x in ((asked.k[0], v[0]), (keys, values))
        )
        rows.append(torch.where(later, theirs, ours))
    with regard.intervene(model, PutContext(torch.stack(rows).unsqueeze(0), layer=0)), torch.no_grad():
        expected = model(tokens)
    changes = [ApplyPolicy(policy, PROMPT, layer=0, head=chosen) for policy, chosen in zip(policies, heads, strict=True)]
    with regard.intervene(model, *(changes[::-1] if is_reversed else changes)), torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ApplyPolicy("h2o", 3), "policy must be a Policy"),
        (lambda: ApplyPolicy(Knorm(3), 0), "prompt"),
    ],
)
def test_what_is_no_policy_or_prompt_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_text_shorter_than_the_prompt_and_a_cache_are_refused():
    model = make_model()
    with regard.intervene(model, ApplyPolicy(Knorm(3), 12)), pytest.raises(ConfigError, match="12 tokens, but the text has 7"):
        model(draw_tokens(1, 7))
    with (
        regard.intervene(model, ApplyPolicy(Knorm(3), 5)),
        pytest.raises(ConfigError, match=r"in one forward|but the text has 1"),
    ):
        list(model.generate(draw_tokens(1, 7), 3))
