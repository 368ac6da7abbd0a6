"""A context that is read once and continued from the cache gives what one forward with the policy gives."""

import pytest
import torch

import regard
from observe.models import gpt2, llama
from policies.test_policy import SHIPPED
from policy_audit.small_models import make_model
from regard.policies import Knorm, StreamingLLM
from regard.policy_audit import ApplyPolicy, NeedleTask, find_needles
from regard.policy_audit.read_context import ReadContext

TOKENS, CONTEXT = 41, 31
SPARING = [policy for policy in SHIPPED if policy.reads_whole_prompt]
MODELS = {"llama": llama, "gpt2": gpt2}


def draw_tokens(seed=3):
    return torch.randint(3, 101, (1, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]().double()


@pytest.mark.slow
@torch.no_grad()
def test_the_logits_are_those_of_one_forward(model):
    tokens = draw_tokens()
    context = ReadContext.read(model, tokens[:, :CONTEXT])
    complete = model(input_ids=tokens).logits[:, CONTEXT:]
    for policy in [None, *SPARING, Knorm(3), None]:  # one reading serves all, in any order
        with regard.intervene(model, *([] if policy is None else [ApplyPolicy(policy, CONTEXT)])):
            whole = model(input_ids=tokens).logits[:, CONTEXT:]
        torch.testing.assert_close(context.continue_with(tokens[:, CONTEXT:], policy), whole, rtol=0, atol=1e-10)
        assert policy is None or not torch.allclose(whole, complete, atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_needles_are_those_of_whole_forwards(model, monkeypatch):
    tokens = draw_tokens()[0].tolist()
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    tasks = [NeedleTask("single", (*tokens[: n + 1], int(logits[n].argmax())), n - 3, n + 1) for n in range(33, 40)]
    policies = [Knorm(1.0), *SPARING, StreamingLLM(2, 5)]
    found = find_needles(model, tasks, policies)
    monkeypatch.setattr(ReadContext, "read", lambda model, ids: None)
    assert found == find_needles(model, tasks, policies)
    assert found[0] == found[1] == [True] * 7
    assert not all(map(all, found))


@torch.no_grad()
def test_a_context_is_read_only_where_a_cache_holds_every_key():
    assert ReadContext.read(make_model(), draw_tokens() % 29) is None  # no model of transformers
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 32}
    sliding = MistralForCausalLM(MistralConfig(num_hidden_layers=2, vocab_size=101, sliding_window=8, **sizes)).eval()
    assert ReadContext.read(sliding, draw_tokens()) is None
