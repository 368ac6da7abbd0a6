"""Direct contributions beside hooks on the model's own output projections."""

from contextlib import nullcontext

import pytest
import torch

import regard
from attribution.small_models import make_model
from observe.family import Widened
from observe.models import gpt2, llama, words
from regard.errors import ConfigError, OutOfRangeError

SIZES = {"gpt2": ("transformer.ln_f", "attn.c_proj"), "llama": ("model.norm", "self_attn.o_proj")}
HEADS = {"gpt2": 4, "llama": 6}
EQUAL = 1e-10  # float64


def collect(model, tokens, norm, projection):
    """What went into the last norm, and the outputs of the projections without their biases."""
    found = {"attention": []}
    handles = []
    for name, module in model.named_modules():
        if name == norm:
            handles.append(module.register_forward_pre_hook(lambda _, args: found.update(final=args[0].detach())))
        if name.endswith(projection):

            def keep(module, args, output):
                bias = getattr(module, "bias", None)
                found["attention"].append(output.detach() - (0 if bias is None else bias.detach()))

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        logits = model(tokens).logits
    for handle in handles:
        handle.remove()
    return logits, found


def apply_frozen_norm(model, name, final, x):
    """The last norm of x, with the mean of x and the scale of final, without its shift."""
    norm = model.get_submodule(name)
    if isinstance(norm, torch.nn.LayerNorm):
        scale = (final.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        return norm.weight * (x - x.mean(-1, keepdim=True)) / scale
    return norm.weight * x / (final.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("other", [None, 7])
@pytest.mark.parametrize("query", [-1, 4])
def test_the_contributions_of_all_heads_and_sources_are_what_attention_adds_to_the_logit(build, other, query):
    model, tokens = build().eval(), words(2, 11)
    norm, projection = SIZES[build.__name__]
    logits, found = collect(model, tokens, norm, projection)
    logits, rows = logits.detach(), model.get_output_embeddings().weight.detach()
    direction = rows[3] - (0 if other is None else rows[other])
    with torch.no_grad():
        added = [apply_frozen_norm(model, norm, found["final"], x)[:, query] @ direction for x in found["attention"]]
    expected = torch.stack(added)
    number = logits[:, query, 3] - (0 if other is None else logits[:, query, other])
    result = regard.contributions(model, tokens, 3, other, query=query)
    bound = 1e-5 * float(expected.abs().max() + number.abs().max())  # float32, some hundred terms
    assert (result.heads.sum(2).T - expected).abs().max() < bound
    assert (result.logit - number).abs().max() < bound
    for layer in range(len(expected)):
        maps = result.map(layer)
        assert (maps.dense()[:, :, query].sum((1, 2)) - expected[layer]).abs().max() < bound
        rest = [row for row in range(11) if row != query % 11]
        assert not maps.dense()[:, :, rest].any()
        assert maps.certificate().error < 1e-4


@pytest.mark.parametrize("build", [gpt2, llama])
def test_what_is_carried_is_the_norm_of_the_projected_values(build):
    model, tokens = build().eval(), words(1, 9)
    result = regard.contributions(model, tokens, 0)
    with torch.no_grad(), regard.record(model, keep="values") as recording:
        model(tokens)
    name = recording.layers()[1]
    module = model.get_submodule(name)
    weight = (module.c_proj.weight if build is gpt2 else module.o_proj.weight.T).detach()  # (h e, c)
    values, weights = recording.values(1), recording.map(1).dense()
    h = weights.shape[1]
    values = values.repeat_interleave(h // values.shape[1], 1)
    expected = weights * torch.einsum("bhke,hec->bhkc", values, weight.view(h, -1, weight.shape[1])).norm(dim=-1).unsqueeze(2)
    torch.testing.assert_close(result.map(1, kind="carried").dense(), expected, rtol=1e-4, atol=1e-6)


def project_each_head(model, tokens, name):
    """What each head writes through the model's own output projections (b, h, t, c), and all of it (b, t, c), by layer.

    Beside them what goes into the last norm. Biases and gains are drawn at random before.
    """
    found, final, (norm, projection) = [], [], SIZES[name]
    modules = [one for path, one in model.named_modules() if path.endswith(projection)]
    for one in model.parameters():
        if one.dim() == 1:
            torch.nn.init.normal_(one, mean=1.0)
    handles = [one.register_forward_hook(lambda one, args, y: found.append((one, args[0], y))) for one in modules]
    handles.append(model.get_submodule(norm).register_forward_pre_hook(lambda _, args: final.append(args[0])))
    with torch.no_grad():
        model(tokens)
        for handle in handles:
            handle.remove()
        alone = [split_heads(one, x, HEADS[name]) for one, x, _ in found]
    return alone, [y for _, _, y in found], final[0]


def split_heads(module, x, heads):
    """The outputs of a projection, without its bias, for the input of one head at a time, (b, h, t, c)."""
    e = x.shape[-1] // heads
    parts = [torch.zeros_like(x).index_copy(-1, at, x[..., at]) for at in torch.arange(heads * e).split(e)]
    return torch.stack([module(part) - module(torch.zeros_like(x)) for part in parts], 1)


@pytest.fixture(params=[gpt2, llama])
def exact_build(request, in_float64):
    """A model in float64; the norms of llama are widened, of GPT-2 nothing is, which would hide a number of ours in float32."""
    with Widened() if request.param is llama else nullcontext():
        yield request.param


@pytest.mark.parametrize("queries", [-1, [0, 4], slice(None), slice(2, 9)])
def test_the_outputs_of_all_heads_and_the_bias_are_what_the_models_own_projection_wrote(exact_build, queries):
    model, tokens = exact_build().eval(), words(2, 11)
    alone, written, _ = project_each_head(model, tokens, exact_build.__name__)
    result = regard.contributions(model, tokens, 3)
    for layer, (parts, whole) in enumerate(zip(alone, written, strict=True)):
        found = result.head_outputs(layer, queries)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, parts[:, :, queries], rtol=0, atol=EQUAL)
        module = model.get_submodule(result.recording.layers()[layer])
        bias = module.c_proj.bias.detach() if exact_build is gpt2 else 0
        torch.testing.assert_close(found.sum(1) + bias, whole[:, queries], rtol=0, atol=EQUAL)


@pytest.mark.parametrize("queries", [4, [4, 0], slice(1, 9)])
def test_the_logit_lens_is_the_last_norm_and_the_unembedding_of_what_each_head_wrote(exact_build, queries):
    model, tokens = exact_build().eval(), words(2, 11)
    alone, _, final = project_each_head(model, tokens, exact_build.__name__)
    result, row = regard.contributions(model, tokens, 3, query=4), 0 if isinstance(queries, list) else 3
    unembedding = model.get_output_embeddings().weight.detach()
    for layer, parts in enumerate(alone):
        with torch.no_grad():
            read = apply_frozen_norm(model, SIZES[exact_build.__name__][0], final.unsqueeze(1), parts) @ unembedding.T
        lens = result.logit_lens(layer, queries)
        torch.testing.assert_close(lens.logits, read[:, :, queries], rtol=0, atol=EQUAL)
        of_the_query = lens.logits if queries == 4 else lens.logits[:, :, row]
        torch.testing.assert_close(of_the_query[..., 3], result.heads[:, layer], rtol=0, atol=EQUAL)
        values, tokens_raised = lens.top(2)
        assert torch.equal(values[..., 0], lens.logits.amax(-1))
        assert torch.equal(lens.logits.gather(-1, tokens_raised), values)


@pytest.mark.parametrize("wrong", [{"token": 10**6}, {"query": 99}, {"token": -(10**6)}])
def test_a_token_or_query_that_is_not_there_is_refused(wrong):
    given = {"token": 0, "query": -1} | wrong
    with pytest.raises(OutOfRangeError):
        regard.contributions(gpt2(), words(1, 9), given["token"], query=given["query"])


@pytest.mark.parametrize("tokens", [torch.ones(1, 3), torch.ones(3).long(), "text", torch.ones(1, 0).long()])
def test_an_input_that_is_not_tokens_is_refused(tokens):
    with pytest.raises(ConfigError, match="tokens must be ids"):
        regard.contributions(gpt2(), tokens, 0)


def test_a_head_whose_output_reaches_the_logits_through_norms_alone_is_refused():
    with pytest.raises(ConfigError, match="a norm follows it"):
        regard.contributions(make_model("gpt"), words(2, 11) % 61, 3)
