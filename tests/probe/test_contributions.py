"""Direct contributions beside hooks on the model's own output projections."""

import pytest
import torch

import regard
from observe.models import gpt2, llama, words
from regard.errors import ConfigError, OutOfRangeError

SIZES = {"gpt2": ("transformer.ln_f", "attn.c_proj"), "llama": ("model.norm", "self_attn.o_proj")}


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


def test_the_largest_heads_are_printed_with_the_token_they_bring(capsys):
    result = regard.contributions(gpt2().eval(), words(1, 9), 3)
    text = str(result)
    assert "mostly from" in text
    assert "by the direct path" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("wrong", [{"token": 10**6}, {"query": 99}, {"token": -(10**6)}])
def test_a_token_or_query_that_is_not_there_is_refused(wrong):
    given = {"token": 0, "query": -1} | wrong
    with pytest.raises(OutOfRangeError):
        regard.contributions(gpt2(), words(1, 9), given["token"], query=given["query"])


@pytest.mark.parametrize("tokens", [torch.ones(1, 3), torch.ones(3).long(), "text", torch.ones(1, 0).long()])
def test_an_input_that_is_not_tokens_is_refused(tokens):
    with pytest.raises(ConfigError, match="tokens must be ids"):
        regard.contributions(gpt2(), tokens, 0)
