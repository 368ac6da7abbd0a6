"""attn_implementation="regard" of models whose scores have a softcap or sinks: equal to "eager", recorded compiled or not."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

import regard
from bounds import assert_within, estimate_rounding, gamma
from observe.family import Widened, widen
from regard.observe import record
from regard.observe.interception.functions.hf_implementation import attend_and_observe

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor


@pytest.fixture(autouse=True)
def dynamo_reset():
    regard.register_attention()
    transformers.logging.set_verbosity_error()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build_gemma2(implementation, **settings):
    settings = {**SIZES, "attn_logit_softcapping": 1.5, "attn_implementation": implementation, **settings}
    return spread(Gemma2ForCausalLM, Gemma2Config(**settings))


def build_gpt_oss(implementation, **settings):
    settings = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 2, "attn_implementation": implementation, **settings}
    return spread(GptOssForCausalLM, GptOssConfig(**settings))


def spread(build, config):
    torch.manual_seed(3)
    model = build(config)
    widen(model, 1.2)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")  # takes float64, and compiles to one graph
    return model.double().eval()


def feed(padded=True):
    torch.manual_seed(5)
    ids = torch.randint(1, 64, (2, 11))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def run(model, given, function=None):
    """Logits of the tokens that are no padding, and the gradients of all parameters."""
    model.zero_grad()
    logits = (model if function is None else function)(**given).logits
    real = given["attention_mask"].bool()
    logits[real].square().mean().backward()
    return logits[real].detach(), [None if x.grad is None else x.grad.clone() for x in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("build", [build_gemma2, build_gpt_oss])
def test_outputs_and_gradients_are_those_of_eager_attention(build, padded):
    given, eager, model = feed(padded), build("eager"), build("regard")
    with Widened():  # norms and Gemma 2's softmax are in float32 otherwise
        (expected, slopes), (found, found_slopes) = run(eager, given), run(model, given)
    assert_within(found, expected, 1e-10)
    for name, slope, one in zip(dict(model.named_parameters()), slopes, found_slopes, strict=True):
        assert (slope is None) == (one is None), name
        if slope is not None:
            assert_within(one, slope, 1e-10 * (1 + float(slope.abs().max())), name)
    plain, compiled = run(model, given), run(model, given, torch.compile(model, backend="eager"))
    assert torch.equal(plain[0], compiled[0])
    assert all(map(torch.equal, *([x for x in one[1] if x is not None] for one in (plain, compiled))))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build", [build_gemma2, build_gpt_oss])
def test_recorded_compiled_and_not_with_the_bits_that_it_has_without_a_recording(build, backend):
    given, model, eager = feed(), build("regard"), build("eager")
    with Widened(), torch.no_grad(), record(eager) as plain, record(model) as uncompiled:
        eager(**given)
        model(**given)
    with torch.no_grad(), record(model) as in_float32:
        model(**given)
    compiled = torch.compile(model, backend=backend)
    expected = run(model, given, compiled)
    with record(compiled) as recording:
        found = run(model, given, compiled)
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, *([x for x in slopes if x is not None] for slopes in (found[1], expected[1]))))
    allowed = 0.0 if backend == "eager" else 1e-5  # norms are in float32
    for one, other, distance in ((uncompiled, plain, 1e-10), (recording, in_float32, allowed)):
        assert not one.missed
        assert one.names == other.names
        for layer in range(2):
            real = given["attention_mask"].bool()[:, None].expand(2, 4, -1)
            assert_within(one.map(layer).dense()[real], other.map(layer).dense()[real], distance)


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_gemma2, build_gpt_oss])
@torch.no_grad()
def test_float32_is_off_by_no_more_than_its_rounding(build):
    given, exact = feed(), build("regard")
    real = given["attention_mask"].bool()
    allowed = estimate_rounding(exact, lambda model: model(**given).logits[real], SIZES["intermediate_size"])
    model = build("regard").float()
    for one in (model, torch.compile(model)):
        assert_within(one(**given).logits[real], exact(**given).logits[real], allowed)


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_gemma2, build_gpt_oss])
def test_weights_are_dropped_in_training_as_by_eager_attention_with_the_same_seed(build):
    given, outputs = feed(padded=False), []
    for implementation in ("eager", "regard"):
        model = build(implementation, attention_dropout=0.4).train()
        torch.manual_seed(11)
        with Widened():
            outputs.append(model(**given).logits)
    assert_within(outputs[1].detach(), outputs[0].detach(), 1e-10)
    torch.manual_seed(12)
    with record(model) as recording:
        assert (model(**given).logits - outputs[1]).abs().max() > 1e-3
    rows = recording.map(0).dense().sum(-1)
    assert float(rows.max()) <= 1 + 1e-10  # the map is of the weights before dropout


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_gemma2, build_gpt_oss])
@torch.no_grad()
def test_a_generation_with_a_cache_is_that_of_eager_attention_and_one_map(build):
    ids = feed()["input_ids"][:, :7]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    eager, model = build("eager"), build("regard")
    with Widened(), record(eager) as plain:
        expected = eager.generate(ids, **settings)
    with Widened(), record(model) as uncompiled:
        assert torch.equal(model.generate(ids, **settings), expected)
    model.forward = torch.compile(model.forward, backend="eager")
    with record(model) as recording:
        assert torch.equal(model.generate(ids, **settings), expected)
    for layer in range(2):
        for one, distance in ((uncompiled, 1e-10), (recording, 1e-5)):  # norms are in float32 where it is compiled
            assert not one.missed
            assert_within(one.map(layer).dense(), plain.map(layer).dense(), distance)


class Caller(nn.Module):
    is_causal = True


def expect(q, k, v, seen, *, bias=0.0, softcap=None, sinks=None):
    """The formula, row by row: exp(score) / (Σ exp(score) + exp(sink)) over the keys that a query sees."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = (scores + bias).exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp())
    return (weights / total.where(total > 0, 1.0) @ v).transpose(1, 2)


B, H, G, Q, K, D, E = 2, 6, 3, 5, 7, 11, 13
SCORINGS = [{"softcap": 0.9}, {"s_aux": True}, {"sinks": True}, {"softcap": 0.9, "s_aux": True}, {"softcap": 0.9, "bias": True}]


@pytest.mark.parametrize("scoring", SCORINGS, ids=lambda one: "-".join(one))
@pytest.mark.parametrize("form", ["none", "causal", "bool", "float", "infinite"])
def test_every_form_of_mask_gives_the_formula_and_its_gradient_also_for_queries_that_see_nothing(form, scoring):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = draw(B, H, Q, D), draw(B, G, K, D), draw(B, G, K, E)
    seen = torch.rand(B, 1, Q, K, generator=generator) < 0.6
    seen[1, 0, 2] = False
    added, given, known = 0.0, {"scaling": 0.3, "is_causal": form == "causal"}, {}
    mask = None
    if form == "none":
        seen = torch.ones(Q, K, dtype=torch.bool)
    elif form == "causal":
        seen = torch.ones(Q, K, dtype=torch.bool).tril()
    elif form == "bool":
        mask = seen
    else:
        added = torch.randn(B, 1, Q, K, generator=generator, dtype=torch.float64)
        hidden = -torch.inf if form == "infinite" else torch.finfo(torch.float64).min
        if form == "float":
            seen[1, 0, 2] = True  # scores of the least number would be seen alike
        mask = added.masked_fill(~seen, hidden)
    if "bias" in scoring:
        given["position_bias"] = draw(1, H, Q, K)
        added = added + given["position_bias"]
    if "softcap" in scoring:
        given["softcap"] = known["softcap"] = scoring["softcap"]
    if "s_aux" in scoring:
        given["s_aux"] = draw(H)
        known["sinks"] = given["s_aux"][:, None, None]
    if "sinks" in scoring:
        given["sinks"] = known["sinks"] = draw(B, H, Q, 1)
    found, weights = attend_and_observe(Caller(), q, k, v, mask, **given)
    expected = expect(q, k, v, seen, bias=added, **known)
    assert weights is None
    assert_within(found.detach(), expected.detach(), 1e-12)
    leaves = [x for x in (q, k, v, *given.values()) if isinstance(x, torch.Tensor)]
    r = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, slope in zip(*(torch.autograd.grad((context * r).sum(), leaves) for context in (found, expected)), strict=True):
        assert_within(one, slope, 1e-11)


def test_half_precision_is_off_by_its_own_rounding_and_no_more():
    torch.manual_seed(2)
    q, k, v = (torch.randn(B, H, n, D, dtype=torch.bfloat16) for n in (Q, Q, Q))
    found, _ = attend_and_observe(Caller(), q, k, v, scaling=0.3, softcap=0.9)
    expected = expect(*(x.double() for x in (q, k, v)), torch.ones(Q, Q).tril(), softcap=0.9)
    assert found.dtype == torch.bfloat16
    # scores of at most 0.9 are rounded 4 times, weights once, the context once
    assert_within(found, expected, (5 * 0.9 * 2 + 2) * gamma(torch.bfloat16, 1) * float(v.double().abs().max()))


def test_without_a_softcap_and_sinks_it_is_the_kernel_to_the_bit():
    torch.manual_seed(2)
    q, k, v = (torch.randn(B, H, Q, D) for _ in range(3))
    found, _ = attend_and_observe(Caller(), q, k, v, scaling=0.3)
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2))
