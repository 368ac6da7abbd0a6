import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from bounds import EXPONENTIAL, TORCH_EXPONENTIAL, assert_within, attention_bounds, sum_bound
from observe.eager_weights import are_equal, compare_with_eager, find_map, largest, list_attentions, run
from observe.families import FAMILIES, find_family
from observe.family import Widened, widen
from observe.parametrized_families import parametrize_families
from observe.recording_checks import EQUAL
from regard import Given, attend
from regard.observe import record, recording_watcher
from regard.observe.interception.functions import hf_registry

every = parametrize_families(FAMILIES)


@pytest.mark.slow
@every
def test_the_output_inside_is_the_output_outside_to_the_bit(family):
    for side in family.sides:
        assert compare_with_eager(family, side).unchanged, side


@pytest.mark.slow
@every
def test_every_layer_is_recorded_once_and_nothing_is_missed(family):
    for side in family.sides:
        found = compare_with_eager(family, side)
        assert found.maps > 0
        assert found.recorded == found.maps + family.beside
        assert family.apart or not found.missed


@pytest.mark.slow
@every
def test_the_map_is_what_the_same_model_says_with_eager_attention(family):
    for side in family.sides:
        assert compare_with_eager(family, side).difference < EQUAL, side


@pytest.mark.slow
@every
def test_the_map_in_float32_is_the_one_in_float64_within_its_rounding(family):
    found, allowed = compare_with_eager(family, family.sides[-1]).rounding
    assert found <= allowed


@pytest.mark.slow
@every
def test_the_map_of_eager_attention_is_its_weights_where_nothing_is_seen_too(family):
    for side in family.sides:
        assert compare_with_eager(family, side).eager < EQUAL, side


@every
def test_attentions_requested_inside_are_maps(family):
    for side in family.sides:
        found = compare_with_eager(family, side)
        assert found.asked < EQUAL, side
        assert found.handed == (0 if family.apart else found.maps)


def test_a_family_that_hands_out_the_mean_over_heads_is_recorded_with_each():
    model = find_family("wavlm").build(torch.float64)
    with Widened():
        output, recording = run(model, find_family("wavlm").feed(model), recorded=True, output_attentions=True)
    for layer, mean in enumerate(output.attentions):
        assert (recording.map(layer).dense().mean(1) - mean[:, 0]).abs().max() < EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_self_and_cross_attention_merged_in_one_row_are_one_map_whose_halves_are_handed_out(side):
    family = find_family("t5gemma2")
    model, other = family.build(torch.float64), family.build(torch.float64, attn_implementation="eager")
    given = family.feed(model, side)
    with Widened():
        told, _ = run(other, given, output_attentions=True)
        handed, recording = run(model, given, recorded=True, output_attentions=True)
    for layer, halves in enumerate(zip(told.decoder_attentions, told.cross_attentions, strict=True)):
        assert (recording.map(layer).dense() - torch.cat(halves, -1)).abs().max() < EQUAL
        assert (handed.cross_attentions[layer] - halves[1]).abs().max() < EQUAL


def test_a_layer_that_calls_its_kernel_twice_has_both_calls():
    family = find_family("diffllama")
    model, other = family.build(torch.float64), family.build(torch.float64, attn_implementation="eager")
    with Widened():
        told, _ = run(other, family.feed(model), output_attentions=True)
        _, recording = run(model, family.feed(model), recorded=True)
    for name, weights in zip(recording.names, told.attentions, strict=True):
        assert len(recording[name]) == 2
        assert all((call.map.dense() - weights).abs().max() < EQUAL for call in recording[name])


# what a kernel shows of rows that see nothing: it gives zeros, eager attention a uniform row


@pytest.mark.parametrize(("implementation", "row"), [("sdpa", 0.0), ("eager", 1 / 13)])
def test_a_blind_row_is_what_the_implementation_makes_of_it(implementation, row):
    model = find_family("llama").build(attn_implementation=implementation)
    _, recording = run(model, find_family("llama").feed(model, "left"), recorded=True)
    blind = recording.map(0)[1, :, :5]  # the second sequence begins with five of padding
    assert_within(blind, torch.full(blind.shape, row, dtype=torch.float64), sum_bound(torch.float32, 13 + EXPONENTIAL, row))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side"), [("llama", "left"), ("mistral", "right"), ("gemma2", "none"), ("bert", "right"), ("t5", "none")]
)
def test_flex_attention_is_recorded_with_its_block_mask_and_its_bias(name, side):
    family = find_family(name)
    model, other = (family.build(torch.float64, attn_implementation=name) for name in ("flex_attention", "eager"))
    rows = 1 if name == "t5" else 3  # transformers indexes its bias, which has one row, by the row of the batch
    given = {key: x[:rows] for key, x in family.feed(model, side).items()}
    torch.compiler.set_stance("force_eager")  # what its compiler makes of it is the same, after half a minute
    try:
        with Widened():
            plain, _ = run(model, given)
            inside, recording = run(model, given, recorded=True)
            told, _ = run(other, given, output_attentions=True)
    finally:
        torch.compiler.set_stance("default")
    assert are_equal(plain, inside)
    assert not recording.missed
    found = {key: (find_map(recording, key).dense(), weights) for key, weights in list_attentions(told).items()}
    assert largest(found, given.get("attention_mask")) < EQUAL


# nothing is left behind


def collect_changeable_state():
    """All that a recording may change for a while, as it is now."""
    owners = (AttentionInterface, F, nn.Module, torch)
    names = ("get_interface", "__getitem__", "scaled_dot_product_attention", "__call__", "_native_multi_head_attention")
    held = [vars(owner).get(name) for owner in owners for name in names]
    return held, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(AttentionInterface._global_mapping)


def hooks(model):
    return [[len(one) for one in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)] for m in model.modules()]


@pytest.mark.parametrize("name", ["gpt2", "bart", "clip", "gpt_oss"])
def test_nothing_is_left_behind(name):
    before, model = collect_changeable_state(), find_family(name).build()
    given, hooked = find_family(name).feed(model), hooks(model)
    run(model, given, recorded=True)
    assert collect_changeable_state() == before
    assert "get_interface" in vars(AttentionInterface)
    assert "__getitem__" not in vars(AttentionInterface)  # it is inherited
    assert hooks(model) == hooked
    assert not any("regard" in repr(value) for m in model.modules() for value in vars(m).values() if callable(value))


def test_nothing_is_left_behind_by_a_forward_that_fails():
    before, model = collect_changeable_state(), find_family("llama").build()
    model.layers[1].mlp.forward = fail
    with pytest.raises(ZeroDivisionError), record(model) as recording:
        model(**find_family("llama").feed(model))
    assert collect_changeable_state() == before
    assert [call.name for call in recording.calls] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_a_forward_after_one_that_failed_is_a_run_of_its_own():
    model = find_family("llama").build()
    given = find_family("llama").feed(model)
    mlp = model.layers[1].mlp
    forward = mlp.forward
    with record(model) as recording:
        mlp.forward = fail
        with pytest.raises(ZeroDivisionError):
            model(**given)
        mlp.forward = forward
        model(**given)
    assert [len(one.calls) for one in recording.runs] == [2, 3]


def fail(*args):
    raise ZeroDivisionError


def test_a_function_of_ones_own_in_the_registry_is_intercepted_and_still_there(monkeypatch):
    seen = []
    former = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def own(module, *args, **kwargs):
        seen.append(module)
        return former(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    model = find_family("llama").build()
    given = find_family("llama").feed(model)
    with record(model) as recording:
        model(**given)
    assert len(seen) == len(recording.calls) == 3
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == {"sdpa": own}
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


# flash-attention's own rules, which no CPU runs


def flash(q, k, mask=None, causal=True, **given):
    module = SimpleNamespace(is_causal=causal)
    return hf_registry.build_call("flash_attention_2", module, q, k, k, mask, {"scaling": 0.5, **given})


def test_flash_attention_is_aligned_to_the_last_key():
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8)
    passage = flash(q, k)
    seen = torch.ones(3, 7).tril(4).bool()
    assert torch.equal(passage.mask.table(3, 7, passage.offset), seen)


def test_flash_attention_has_its_window_and_its_padding():
    q, mask = torch.randn(2, 4, 7, 8), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    passage = flash(q, q, mask, sliding_window=3)
    near = torch.ones(7, 7).tril().triu(-2).bool()
    assert torch.equal(passage.mask.table(7, 7), near & mask.bool()[:, None, None])
    both_sides = flash(q, q, causal=False, sliding_window=3)
    assert torch.equal(both_sides.mask.table(7, 7), torch.ones(7, 7).tril(2).triu(-2).bool())


def test_flash_attention_keeps_packed_sequences_apart():
    q = torch.randn(1, 4, 7, 8)
    passage = flash(q, q, cu_seq_lens_k=torch.tensor([0, 3, 7]))
    apart = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).tril().bool()
    assert torch.equal(passage.mask.table(7, 7).expand(1, 1, 7, 7)[0, 0], apart)


class Calls(nn.Module):
    """A module that looks a function up in the registry and calls it."""

    def __init__(self, implementation="sdpa", causal=True, look=None):
        super().__init__()
        self.implementation, self.is_causal = implementation, causal
        self.look = look or (lambda name: ALL_ATTENTION_FUNCTIONS.get_interface(name, None))

    def forward(self, *args, **given):
        context, weights = self.look(self.implementation)(self, *args, **given)
        return context if weights is None else (context, weights)


def test_keys_in_pages_that_flash_attention_reads_itself_are_missed(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", lambda module, q, *_, **__: (q, None))
    q, calls = torch.randn(1, 4, 3, 12), Calls("flash_attention_2")
    with pytest.warns(UserWarning, match="pages"), record(calls) as recording:
        calls(q, q, q, cache=object())
    assert "pages" in recording.missed[0].reason
    assert not recording.calls


@pytest.mark.parametrize("sharper", [1.0, 1.5])
def test_eager_attention_that_computes_something_else_is_missed(sharper):
    def own(module, q, k, v, mask, scaling, **given):
        weights = (q @ k.mT * scaling * sharper).softmax(-1)
        return (weights @ v).transpose(1, 2), weights

    q, k = torch.randn(2, 4, 3, 12), torch.randn(2, 4, 3, 12)
    calls = Calls("eager", look=lambda name: ALL_ATTENTION_FUNCTIONS.get_interface(name, own))
    with warnings.catch_warnings(), record(calls) as recording:
        warnings.simplefilter("ignore")
        calls(q, k, k, None, scaling=1.0)
    assert len(recording.calls) == (1 if sharper == 1 else 0)
    assert [one.reason for one in recording.missed] == ([] if sharper == 1 else [recording_watcher.OTHERWISE])


@pytest.mark.parametrize("row", [0, 2, 6])
def test_eager_attention_that_differs_in_some_rows_is_missed(row):
    def own(module, q, k, v, mask, scaling, **given):
        scores = q @ k.mT * scaling
        scores[:, :, row:-1] = 0
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2), weights

    q, k = torch.randn(2, 4, 13, 12), torch.randn(2, 4, 13, 12)
    calls = Calls("eager", look=lambda name: ALL_ATTENTION_FUNCTIONS.get_interface(name, own))
    with warnings.catch_warnings(), record(calls) as recording:
        warnings.simplefilter("ignore")
        calls(q, k, k, None, scaling=1.0)
    assert [one.reason for one in recording.missed] == [recording_watcher.OTHERWISE]
    assert not recording.calls


LOOKS = {
    "get_interface": lambda name: ALL_ATTENTION_FUNCTIONS.get_interface(name, None),
    "an item": lambda name: ALL_ATTENTION_FUNCTIONS[name],
    "get": lambda name: ALL_ATTENTION_FUNCTIONS.get(name),
    "items": lambda name: dict(ALL_ATTENTION_FUNCTIONS.items())[name],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_every_way_to_look_a_function_up_is_intercepted(look):
    q, calls = torch.randn(1, 4, 3, 12), Calls(look=look)
    with record(calls) as recording:
        _, weights = calls(q, q, q, None, output_attentions=True)
    assert len(recording.calls) == 1
    assert torch.equal(weights.dense(), recording.map(0).dense())


def test_a_function_that_was_looked_up_before_is_intercepted_at_the_kernel():
    former = ALL_ATTENTION_FUNCTIONS["sdpa"]
    q, calls = torch.randn(1, 4, 3, 12), Calls(look=lambda name: former)
    with record(calls) as recording:
        calls(q, q, q, None)
    assert len(recording.calls) == 1


# what a call of the registry says


@pytest.mark.parametrize("causal", [True, False])
def test_a_cache_with_room_hands_over_keys_that_nobody_has_written(causal):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
    passage = hf_registry.build_call("sdpa", SimpleNamespace(is_causal=causal), q, k, k, None, {})
    assert passage.k.shape[2] == (5 if causal else 9)


def test_one_query_without_a_mask_sees_every_key():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 9, 8)
    passage = hf_registry.build_call("sdpa", SimpleNamespace(is_causal=True), q, k, k, None, {})
    assert passage.mask.table(1, 9).all()


@pytest.mark.parametrize("mask", ["none", "bool", "numbers"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_of_positions_is_in_the_map(mask, causal):
    q, k, bias = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.randn(1, 4, 5, 5)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(1)
    seen[1, :, :, 0] = False
    given = {"none": None, "bool": seen, "numbers": torch.zeros(2, 1, 5, 5).masked_fill(~seen, torch.finfo(q.dtype).min)}[mask]
    calls = Calls(causal=causal)
    with record(calls) as recording:
        context = calls(q, k, k, given, position_bias=bias, scaling=1.0)
    weights, fast = recording.map(0).dense(), TORCH_EXPONENTIAL[q.dtype]
    bounds = attention_bounds(q.dtype, q, k, k, weights, scale=1.0, bias=bias, exponential=fast)
    assert_within(recording.map(0) @ k, context.transpose(1, 2), bounds.context)


@pytest.mark.parametrize("mask", ["none", "bool"])
def test_a_bias_of_positions_may_be_written_to_between_layers(mask):
    q, k = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(2))
    biases = torch.randn(2, 1, 4, 5, 5, dtype=torch.float64)
    given = None if mask == "none" else torch.ones(2, 1, 5, 5, dtype=torch.bool).tril(1)
    shared, calls = torch.empty(1, 4, 5, 5, dtype=torch.float64), nn.ModuleList([Calls(causal=False), Calls(causal=False)])
    rows = iter(biases)
    model = Together(calls, lambda: shared.copy_(next(rows)))
    with torch.inference_mode(), record(model) as recording:
        model(q, k, k, given, position_bias=shared, scaling=1.0)
    for layer, bias in enumerate(biases):
        expected = attend(q, k, k, *(() if given is None else (Given(given),)), scale=1.0, bias=bias).weights
        assert (recording.map(layer).dense() - expected).abs().max() < EQUAL


class Together(nn.Module):
    """Modules that are handed the same, and what happens before each."""

    def __init__(self, modules, before):
        super().__init__()
        self.parts, self.before = modules, before

    def forward(self, *args, **given):
        for part in self.parts:
            self.before()
            part(*args, **given)


def test_a_padding_mask_of_flash_attention_may_be_written_to_afterwards():
    q, mask = torch.randn(2, 4, 7, 8), torch.ones(2, 7, dtype=torch.bool)
    passage = flash(q, q, mask)
    mask.zero_()
    assert torch.equal(passage.mask.table(7, 7).expand(2, 1, 7, 7)[1, 0], torch.ones(7, 7).tril().bool())


@pytest.mark.parametrize("size", [1.0, 0.01])
@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_sinks_that_scale_the_context_behind_the_softmax_are_those_of_the_map(factor, size, monkeypatch):
    from transformers.models.granite_swa import modeling_granite_swa as family

    sizes = {"vocab_size": 43, "hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(5)
    model = family.GraniteSWAModel(family.GraniteSWAConfig(**sizes, num_key_value_heads=2, pad_token_id=0)).eval().double()
    widen(model, 1.2)
    for layer in model.layers:
        layer.self_attn.sinks.data.fill_(1.0)
        layer.self_attn.v_proj.weight.data.mul_(size)
    own, found = family.eager_attention_forward, []

    def scale(*args, **kwargs):  # weights without the sinks; a factor other than theirs is no attention of q and k
        context, weights = own(*args, **kwargs)
        found.append((factor * context, args[3]))
        return factor * context, weights

    monkeypatch.setattr(family, "eager_attention_forward", scale)
    with torch.no_grad(), Widened(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = torch.randint(1, 43, (2, 13))
        outside = model(ids, output_attentions=True).attentions
        found.clear()
        with record(model) as recording:
            inside = model(ids, output_attentions=True).attentions
    assert bool(recording.missed) == (factor != 1)
    assert all(map(torch.equal, outside, inside))  # which are not those of the map
    for layer, name in enumerate(recording.layers() if factor == 1 else ()):
        context, v = found[layer]
        expected = recording[name][0].map.dense() @ v.repeat_interleave(2, 1)
        assert (expected.transpose(1, 2) - context).abs().max() < EQUAL


@pytest.mark.parametrize("has_bias", [False, True])
def test_sinks_of_each_query_are_those_of_the_map(has_bias):
    def own(module, q, k, v, mask, scaling, sinks, position_bias=0, **given):
        weights = torch.cat([q @ k.mT * scaling + position_bias + mask, sinks], -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(1, 2), weights

    q, k, v = torch.randn(3, 2, 4, 7, 12, dtype=torch.float64)
    sinks = torch.randn(2, 4, 7, 1, dtype=torch.float64)
    sinks[0, :, -1] = -20  # the last row of the first sequence has nearly none
    given = {"position_bias": torch.randn(1, 4, 7, 7, dtype=torch.float64)} if has_bias else {}
    mask = torch.zeros(7, 7, dtype=torch.float64).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)[None, None]
    calls = Calls("eager", look=lambda name: ALL_ATTENTION_FUNCTIONS.get_interface(name, own))
    with record(calls) as recording:
        _, weights = calls(q, k, v, mask, scaling=0.3, sinks=sinks, **given)
    assert not recording.missed
    assert (recording.map(0).dense() - weights).abs().max() < EQUAL


def test_sinks_of_the_module_are_intercepted_in_its_own_function():
    family = find_family("gpt_oss")
    model = family.build()
    _, recording = run(model, family.feed(model), recorded=True)
    passage = recording.last.histories[next(iter(recording.last.histories))].stored_calls[0]
    assert torch.equal(passage.sinks, model.layers[0].self_attn.sinks)
    assert (recording.map(0).dense().sum(-1) < 1).all()
