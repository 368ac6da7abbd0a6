"""Changed recurrences equal the functions of transformers with heads of their results, or parts of their values, left out."""

import inspect
import sys

import pytest
import torch
from torch import nn

from observe.models import CACHE
from observe.recurrent_models import RECURRENT, draw_tokens
from regard import CutEdges, KnockOut, Patch, Temperature, intervene, record

pytestmark = pytest.mark.usefixtures("in_float64")
FUNCTIONS = {  # of families: the function, the argument with the values, the axes of heads and tokens in values and result
    "mamba": ("mamba_selective_scan", "hidden_states", 1, 2),
    "mamba2": ("mamba2_chunk_scan", "hidden_states", 2, 1),
    "qwen3_5_text": ("torch_chunk_gated_delta_rule", "value", 2, 1),
    "lfm2": ("causal_conv1d_fn", "hidden_states", 1, 2),
}
QUERIES, KEYS = [4, 7, 8], [2, 4]
CACHES = (CACHE, "past_key_values", "cache_params")  # names of it
EQUAL = 1e-5  # relative: some of these functions compute in float32


def build(name):
    model = next(one for one in RECURRENT if one.name == name).build().double()
    return model, draw_tokens()


def run(model, tokens, prompt=None):
    """The output of the first block: of one forward, or of a prompt and of one token after another with a cache."""
    block = next(one for one in model.modules() if isinstance(one, nn.ModuleList))[0]
    outputs, cache = [], {}
    handle = block.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        for part in [tokens] if prompt is None else (tokens[:, :prompt], *tokens[:, prompt:].split(1, 1)):
            cache = find_cache(model, model(part, use_cache=True, **cache))
    handle.remove()
    return torch.cat([one[0] if isinstance(one, tuple) else one for one in outputs], 1)


def find_cache(model, output):
    """The cache of an output, as an argument of the model."""
    name = next(one for one in CACHES if one in inspect.signature(model.forward).parameters)
    return {name: next(output[one] for one in CACHES if output.get(one) is not None)}


def with_grad(model, tokens):
    return model(tokens)[0]


def run_with(model, tokens, name, change, run=run):
    """Run a model whose first layer has a function's result changed by `change(result, compute, values)`."""
    function, argument, *axes = FUNCTIONS[name]
    module = sys.modules[type(model).__module__]
    original, calls = getattr(module, function), []

    def replaced(*args, **kwargs):
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        result = original(**bound)
        calls.append(1)
        if len(calls) > 1:
            return result

        def compute(values):
            other = original(**(bound | {argument: values}))
            return other[0] if isinstance(other, tuple) else other

        output = change(result[0] if isinstance(result, tuple) else result, compute, bound[argument], *axes)
        return (output, *result[1:]) if isinstance(result, tuple) else output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, replaced)
        return run(model, tokens)


def mark(x, axis, places):
    """Zeros like a tensor, with ones at places along an axis."""
    return torch.zeros_like(x).index_fill(axis, torch.tensor(places), 1)


def assert_close(found, expected, plain):
    assert (found - expected).abs().max() < EQUAL * expected.abs().max()
    assert (found - plain).abs().max() > 100 * EQUAL * expected.abs().max()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_head_knocked_out_has_an_output_of_zero(name):
    model, tokens = build(name)
    expected = run_with(model, tokens, name, lambda out, _, __, heads, ___: out * (1 - mark(out, heads, [1, 3])))
    with intervene(model, KnockOut(0, [1, 3], kind="implicit")):
        found = run(model, tokens)
    assert_close(found, expected, run(model, tokens))


@pytest.mark.parametrize(("name", "heads"), [(name, (None, [1])[n % 2]) for n, name in enumerate(FUNCTIONS)])
def test_an_output_loses_its_entry_of_the_matrix_times_the_value_of_a_cut_key(name, heads):
    def subtract(out, compute, values, of_heads, of_tokens):
        bias = compute(torch.zeros_like(values))
        part = compute(values * mark(values, of_tokens, KEYS)) - bias
        chosen = mark(out, of_tokens, QUERIES) * (1 if heads is None else mark(out, of_heads, heads))
        return out - part * chosen

    model, tokens = build(name)
    expected, plain = run_with(model, tokens, name, subtract), run(model, tokens)
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, head=heads, kind="implicit")), record(model) as recording:
        assert_close(run(model, tokens), expected, plain)
    assert recording.map(0, kind="implicit").certificate().error < EQUAL  # the matrix is that of the layer itself


@pytest.mark.parametrize("by", ["mean", "resample"])
def test_a_head_is_replaced_by_that_of_other_rows(by):
    model, tokens = build("mamba2")

    def replace(out, compute, values, heads, _):
        other = out.mean(0, keepdim=True) if by == "mean" else out.roll(1, 0)
        return torch.where(mark(out, heads, [2]) > 0, other, out)

    expected = run_with(model, tokens, "mamba2", replace)
    with intervene(model, KnockOut(0, 2, by, kind="implicit")):
        found = run(model, tokens)
    assert_close(found, expected, run(model, tokens))


def test_outputs_of_another_text_are_patched():
    model, tokens = build("mamba2")
    with record(model) as source, torch.no_grad():
        model(tokens.flip(0))

    def swap(out, compute, values, heads, of_tokens):
        return torch.where(mark(out, of_tokens, QUERIES) * mark(out, heads, [2]) > 0, out.flip(0), out)

    expected = run_with(model, tokens, "mamba2", swap)
    patch = Patch(recording=source, layer=0, head=2, of="output", queries=QUERIES, kind="implicit")
    with intervene(model, patch):
        found = run(model, tokens)
    assert_close(found, expected, run(model, tokens))


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5_text"])
def test_a_change_that_changes_nothing_leaves_every_bit(name):
    model, tokens = build(name)
    expected = run(model, tokens)
    for change in (CutEdges([], [], kind="implicit"), KnockOut(head=[], kind="implicit"), CutEdges(2, 5, kind="implicit")):
        with intervene(model, change):
            assert torch.equal(run(model, tokens), expected)


def test_gradients_are_those_of_the_function_without_the_head():
    model, tokens = build("mamba2")
    weight = model.get_parameter("backbone.layers.0.mixer.in_proj.weight")
    expected = run_with(model, tokens, "mamba2", lambda out, _, __, heads, ___: out * (1 - mark(out, heads, [1])), with_grad)
    with intervene(model, KnockOut(0, 1, kind="implicit")):
        found = with_grad(model, tokens)
    one, other = (torch.autograd.grad(y.square().sum(), weight)[0] for y in (found, expected))
    assert (one - other).abs().max() < EQUAL * other.abs().max()


def test_what_a_recurrence_has_not_is_warned_of_and_stays():
    model, tokens = build("mamba2")
    plain = run(model, tokens)
    why = "it has no scores that a temperature divides"
    with (
        pytest.warns(UserWarning, match=f"was not applied: .*{why}"),
        intervene(model, Temperature(t=2.0, kind="implicit")),
    ):
        assert torch.equal(run(model, tokens), plain)


def subtract_with_gradients(model, tokens, name):
    def subtract(out, compute, values, _, of_tokens):
        part = compute(values * mark(values, of_tokens, KEYS)) - compute(torch.zeros_like(values))
        return out - part * mark(out, of_tokens, QUERIES)

    return list_gradients(run_with(model, tokens, name, subtract, with_grad), model)


def list_gradients(output, model):
    return torch.autograd.grad(output.square().sum(), [*model.parameters()], allow_unused=True)


def assert_same_gradients(found, expected):
    size = max(one.abs().max() for one in expected if one is not None)
    for own, theirs in zip(found, expected, strict=True):
        assert (own is None) == (theirs is None)
        assert own is None or (own - theirs).abs().max() < 10 * EQUAL * size


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_the_function_without_the_entries(name):
    model, tokens = build(name)
    with intervene(model, CutEdges(QUERIES, KEYS, layer=0, kind="implicit")):
        found = list_gradients(with_grad(model, tokens), model)
    expected = subtract_with_gradients(model, tokens, name)
    assert_same_gradients(found, expected)
    plain = list_gradients(with_grad(model, tokens), model)
    size = max(one.abs().max() for one in expected if one is not None)
    assert max((x - y).abs().max() for x, y in zip(plain, expected, strict=True) if x is not None) > 100 * EQUAL * size


@pytest.mark.parametrize("name", [pytest.param("mamba", marks=pytest.mark.slow), "lfm2"])  # whose caches keep gradients
def test_gradients_flow_through_the_steps_of_a_cache_to_tokens_of_earlier_ones(name):
    model, tokens = build(name)
    found = []
    with intervene(model, CutEdges([4, 8, 9, 11], [2, 4, 8], layer=0, kind="implicit")):
        for lengths in ([13], [8, 1, 1, 1, 1, 1]):
            outputs, cache = [], {}
            for part in tokens.split(lengths, 1):
                output = model(part, use_cache=True, **cache)
                outputs.append(output[0])
                cache = find_cache(model, output)
            found.append(list_gradients(torch.cat(outputs, 1), model))
    assert_same_gradients(*found)


@pytest.mark.parametrize("name", ["rwkv", "xlstm"])
def test_gradients_of_normalized_and_reset_recurrences_are_differences_of_the_loss(name):
    model, tokens = build(name)
    settings = {"use_cache": False} if name in ("rwkv", "xlstm") else {}  # their states are written in place

    def compute():
        return model(tokens, **settings)[0].square().mean()

    weights, slopes = [*model.parameters()], []
    ways = [torch.randn_like(one) * one.detach().abs().mean() for one in weights]
    with intervene(model, CutEdges(QUERIES, KEYS, kind="implicit")):
        own = torch.autograd.grad(compute(), weights, allow_unused=True)
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_add_(weights, ways, alpha=sign * 1e-4)
                slopes.append(sign * compute() / 2e-4)
                torch._foreach_sub_(weights, ways, alpha=sign * 1e-4)
    expected = sum(slopes)
    found = sum((one * way).sum() for one, way in zip(own, ways, strict=True) if one is not None)
    assert abs(found - expected) < 3e-3 * abs(expected)  # parts of these functions compute in float32


def test_heads_stay_knocked_out_in_a_generation_and_edges_are_cut_in_its_prompt():
    model, tokens = build("mamba2")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with intervene(model, KnockOut(0, [0, 1, 2, 3], kind="implicit")):
        found = model.generate(tokens, output_logits=True, **settings)
        with torch.no_grad():
            whole = model(found.sequences).logits
    for n, logits in enumerate(found.logits):
        assert (logits - whole[:, tokens.shape[1] - 1 + n]).abs().max() < EQUAL * whole.abs().max()


LATE = {
    "edges": lambda source: CutEdges([3, 9, 10, 12], [2, 4, 9], layer=0, kind="implicit"),
    "edges of a head": lambda source: CutEdges(keys=[2, 8], layer=0, head=[1, 3], kind="implicit"),
    "edges from the end": lambda source: CutEdges(slice(8, 11), -2, layer=0, kind="implicit"),
    "a sample": lambda source: KnockOut(0, 1, "resample", source, kind="implicit"),
    "a mean": lambda source: KnockOut(0, [0, 2], "mean", source, kind="implicit"),
}


@pytest.mark.parametrize(
    ("change", "name"), [(one, [*FUNCTIONS][(n + m) % 4]) for n, one in enumerate(LATE) for m in ((0, 2) if n < 2 else (n,))]
)
def test_changes_by_position_are_those_of_one_forward_in_the_steps_of_a_cache(name, change):
    model, tokens = build(name)
    with record(model) as source, torch.no_grad():
        model(tokens.flip(0))
    made = LATE[change](source)
    places = [CutEdges(n, n - 1, layer=0, kind="implicit") for n in (8, 9, 10)]
    with intervene(model, *(places if change == "edges from the end" else [made])):
        expected = run(model, tokens)
    with intervene(model, made):
        found = run(model, tokens, prompt=8)
    assert_close(found, expected, run(model, tokens))


def test_edges_are_cut_in_the_steps_of_beams_and_of_interleaved_texts():
    model, tokens = build("mamba2")
    change = CutEdges([5, 13, 14, 15], [2, 4, 13], layer=0, kind="implicit")
    settings = {"max_new_tokens": 6, "pad_token_id": 0, "return_dict_in_generate": True, "num_beams": 3}
    with intervene(model, change):
        found = model.generate(tokens, output_scores=True, do_sample=False, **settings)
        with torch.no_grad():
            scores = model(found.sequences).logits.log_softmax(-1)
    picked = scores[:, 12:-1].gather(2, found.sequences[:, 13:, None]).squeeze(-1)
    transitions = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    assert (picked.cumsum(1) - transitions.cumsum(1)).abs().max() < EQUAL * picked.abs().max()


def test_heads_and_entries_of_lightning_attention_are_left_out_before_its_norm_also_in_steps():
    model, tokens = build("minimax")
    model.config._experts_implementation = "eager"  # others take no float64
    layer, kept = model.model.layers[0].self_attn, {}
    handle = layer.norm.register_forward_pre_hook(lambda _, args: kept.update(output=args[0]))
    with record(model, keep="values") as recording:
        plain = run(model, tokens)
    handle.remove()
    values, output = recording.values(0, kind="implicit"), kept["output"].unflatten(2, (4, 12)).clone()
    hidden = torch.zeros(13, 13).index_put((torch.tensor([4, 9, 10, 12])[:, None], torch.tensor([2, 4, 9])), torch.tensor(1.0))
    part = (recording.map(0, kind="implicit").dense().double() * hidden) @ values.double()
    output[:, :, 2:] -= part.transpose(1, 2)[:, :, 2:]
    output[:, :, 0] = 0
    handle = layer.norm.register_forward_pre_hook(lambda *_: (output.flatten(2),))
    expected = run(model, tokens)
    handle.remove()
    with intervene(
        model, KnockOut(0, 0, kind="implicit"), CutEdges([4, 9, 10, 12], [2, 4, 9], layer=0, head=[2, 3], kind="implicit")
    ):
        assert_close(run(model, tokens), expected, plain)
        steps = run(model, tokens, prompt=7)
    own_steps = (run(model, tokens, prompt=7) - plain).abs().max()  # those of the family differ from its forward
    assert (steps - expected).abs().max() < EQUAL * expected.abs().max() + own_steps


def test_a_block_that_begins_after_the_prompt_leaves_edges_and_says_why():
    model, tokens = build("mamba2")
    with torch.no_grad():
        cache = find_cache(model, model(tokens, use_cache=True))
    told = pytest.warns(UserWarning, match="was not applied: .* it continues a state that no call in this block has left")
    with told, intervene(model, CutEdges(keys=2, layer=0, kind="implicit")), torch.no_grad():
        model(tokens[:, -1:], **cache)
