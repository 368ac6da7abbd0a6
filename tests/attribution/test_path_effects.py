"""Path effects beside the same four forwards, made with plain hooks on the model's own projections."""

import pytest
import torch

import regard
from observe.models import gpt2, llama, words
from regard.errors import ConfigError, MissingNameError

pytestmark = pytest.mark.usefixtures("in_float64", "float64_models")
EQUAL = 1e-9  # float64
E = 8  # the width of a head in both models


def pick_lead(output):
    """The lead of token 3 over token 7 after the last word, of each row."""
    return output.logits[:, -1, 3] - output.logits[:, -1, 7]


def list_layers(model):
    """Of each layer: what makes q, k and v, with their first columns in its output, and the output projection."""
    if model.config.model_type == "gpt2":
        return [
            ({"q": (a.c_attn, 0), "k": (a.c_attn, 32), "v": (a.c_attn, 64)}, a.c_proj)
            for a in (h.attn for h in model.transformer.h)
        ]
    return [
        ({"q": (a.q_proj, 0), "k": (a.k_proj, 0), "v": (a.v_proj, 0)}, a.o_proj)
        for a in (x.self_attn for x in model.model.layers)
    ]


@torch.no_grad()
def run(model, tokens, contexts=None, inputs=()):
    """The output, the contexts (b, t, h e) of each layer, and what its projections make.

    Contexts are replaced by those that are given, and of what is made the columns of inputs (layer, module, columns, values).
    """
    handles, kept, made = [], [], []
    for number, (sources, projection) in enumerate(list_layers(model)):

        def swap_context(module, args, number=number):
            kept.append(args[0].clone())
            return None if contexts is None else (contexts[number],)

        handles.append(projection.register_forward_pre_hook(swap_context))
        made.append({})
        for module in {module for module, _ in sources.values()}:

            def swap_output(module, args, output, number=number):
                made[number][module] = output = output.clone()
                for layer, one, columns, values in inputs:
                    if (layer, one) == (number, module):
                        output[..., columns] = values
                return output

            handles.append(module.register_forward_hook(swap_output))
    output = model(tokens)
    for handle in handles:
        handle.remove()
    return output, kept, made


def patch_path(model, tokens, source, sender, receivers, into):
    """By how much the lead rises by the direct path, with hooks alone; key heads are those that the receivers share."""
    clean, contexts, _ = run(model, tokens)
    corrupt = run(model, source)[1]
    layer, head = sender
    contexts[layer][..., E * head : E * head + E] = corrupt[layer][..., E * head : E * head + E]
    output, _, direct = run(model, tokens, contexts=contexts)
    inputs = []
    if receivers is not None:
        for number, heads in receivers.items():
            sources = list_layers(model)[number][0]
            for one in into:
                module, first = sources[one]
                for place in {head if one == "q" else head * count_key_heads(model) // count_heads(model) for head in heads}:
                    columns = slice(first + E * place, first + E * place + E)
                    inputs.append((number, module, columns, direct[number][module][..., columns]))
        output = run(model, tokens, inputs=inputs)[0]
    return pick_lead(output) - pick_lead(clean)


def count_heads(model):
    return model.config.num_attention_heads


def count_key_heads(model):
    return getattr(model.config, "num_key_value_heads", count_heads(model))


@pytest.mark.slow
@pytest.mark.parametrize("into", ["qkv", "q", "k", "v"])
def test_the_effect_of_a_path_is_that_of_four_forwards_with_hooks(into):
    model, tokens, source = gpt2(), words(2, 11), words(2, 13)[:, 2:]
    found = regard.path_effects(model, tokens, source, pick_lead, receivers=[(2, 1), (1, 3)], into=into)
    assert list(found) == [(layer, head) for layer in range(2) for head in range(4)]
    for sender, effect in found.items():
        expected = patch_path(model, tokens, source, sender, {2: [1], 1: [3]}, into)
        assert abs(effect - float(expected.mean())) < EQUAL
        assert effect.low < effect < effect.high
        assert effect.count == 2
    assert max(abs(effect) for effect in found.values()) > 1e6 * EQUAL


@pytest.mark.parametrize("into", ["qkv", "q", "v"])
def test_heads_that_share_keys_are_patched_together_as_their_projection_is(into):
    model, tokens, source = llama(), words(2, 11), words(2, 13)[:, 2:]
    found = regard.path_effects(
        model, tokens, source, pick_lead, receivers=[(1, 3), (1, 4), (1, 5)], into=into, senders=[(0, 2)]
    )
    expected = patch_path(model, tokens, source, (0, 2), {1: [3, 4, 5]}, into)
    assert abs(found[0, 2] - float(expected.mean())) < EQUAL


@pytest.mark.slow
def test_the_direct_path_to_the_output_leads_past_all_heads():
    model, tokens, source = gpt2(), words(2, 11), words(2, 13)[:, 2:]
    found = regard.path_effects(model, tokens, source, pick_lead)
    assert len(found) == 12
    for sender in ((0, 1), (1, 2), (2, 3)):
        assert abs(found[sender] - float(patch_path(model, tokens, source, sender, None, "").mean())) < EQUAL
    with torch.no_grad(), regard.record(model, keep="values") as recording:
        model(source)
    with torch.no_grad():
        before = pick_lead(model(tokens))
        with regard.intervene(model, regard.Patch(recording, layer=2, head=3, of="output")):
            whole = pick_lead(model(tokens)) - before
    assert abs(found[2, 3] - float(whole.mean())) < EQUAL  # of the last layer there is no other path


def test_a_sender_that_is_not_before_the_receiver_has_no_effect_at_all():
    model, tokens, source = gpt2(), words(2, 11), words(2, 13)[:, 2:]
    found = regard.path_effects(model, tokens, source, pick_lead, receivers=[(1, 0)], senders=[(1, 1), (2, 0), (0, 0)])
    assert found[1, 1] == found[2, 0] == 0
    assert found[0, 0] != 0


@pytest.mark.slow
def test_the_model_is_left_as_it_was_and_a_dict_of_arguments_is_passed_by_name():
    model, tokens, source = gpt2().train(), words(2, 11), words(2, 13)[:, 2:]
    given = {"receivers": [(2, 0)], "senders": [(0, 0)]}
    one = regard.path_effects(model, tokens, source, pick_lead, **given)
    assert model.training
    by_name = ({"input_ids": x, "attention_mask": torch.ones_like(x)} for x in (tokens, source))
    other = regard.path_effects(model, *by_name, pick_lead, **given)
    assert abs(one[0, 0] - other[0, 0]) < EQUAL


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"measure": lambda output: output.logits}, ConfigError),
        ({"measure": "logits"}, ConfigError),
        ({"watch": 3}, ConfigError),
        ({"senders": "some"}, MissingNameError),
        ({"senders": [(9, 9)]}, ConfigError),
        ({"receivers": [(9, 9)]}, ConfigError),
        ({"receivers": [3]}, ConfigError),
        ({"receivers": []}, ConfigError),
        ({"into": "o"}, MissingNameError),
        ({"source": words(1, 8)}, ConfigError),
        ({"source": words(2, 9)}, ConfigError),
    ],
)
def test_what_cannot_be_measured_is_refused(given, error):
    with pytest.raises(error):
        regard.path_effects(gpt2(), **({"inputs": words(1, 9), "source": words(1, 9), "measure": pick_lead} | given))
