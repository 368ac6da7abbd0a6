"""Changed recurrences equal the functions of transformers with heads of their results, or parts of their values, left out."""

import inspect
import sys

import pytest
import torch
from torch import nn

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
EQUAL = 1e-5  # relative: some of these functions compute in float32


def build(name):
    model = next(one for one in RECURRENT if one.name == name).build().double()
    return model, draw_tokens()


def run(model, tokens):
    """The output of the first block."""
    block = next(one for one in model.modules() if isinstance(one, nn.ModuleList))[0]
    outputs = []
    handle = block.register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    return outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]


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


@pytest.mark.parametrize("heads", [None, [1]], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
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


@pytest.mark.parametrize("name", FUNCTIONS)
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
    with record(model) as source:
        model(tokens)
    for change, why in (
        (Temperature(t=2.0, kind="implicit"), "it has no scores that a temperature divides"),
        (Patch(recording=source, kind="implicit"), "patch its output"),
    ):
        with pytest.warns(UserWarning, match=f"was not applied: .*{why}"), intervene(model, change):
            assert torch.equal(run(model, tokens), plain)
    with pytest.warns(UserWarning, match="was not applied: .*without gradients"), intervene(model, CutEdges(kind="implicit")):
        model(tokens)


def test_heads_stay_knocked_out_in_a_generation_and_edges_are_cut_in_its_prompt():
    model, tokens = build("mamba2")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with intervene(model, KnockOut(0, [0, 1, 2, 3], kind="implicit")):
        found = model.generate(tokens, output_logits=True, **settings)
        with torch.no_grad():
            whole = model(found.sequences).logits
    for n, logits in enumerate(found.logits):
        assert (logits - whole[:, tokens.shape[1] - 1 + n]).abs().max() < EQUAL * whole.abs().max()
    told = pytest.warns(UserWarning, match="A part of the output of .* was not changed: it continues a state")
    with told, intervene(model, CutEdges(12, 2, kind="implicit")):
        model.generate(tokens, **settings)
