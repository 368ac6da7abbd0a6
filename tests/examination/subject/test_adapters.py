"""Whatever somebody calls attention is called as they call it."""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lectures_classes
from examination.subjects import CAUSAL, D_IN, Layer, case_of, hiding, later
from regard import Causal, ConfigError, Everything, MultiHeadAttention, Padding, SelfAttention
from regard.examination import examine
from regard.examination.subject.adapters import iterate_adapters
from regard.examination.subject.attention_output import extract_output

B, T = 2, 6


class Turned(Layer):
    """A layer that is given its places."""

    def __init__(self):
        super().__init__(hiding(later))

    def forward(self, x, cos, sin):
        return super().forward(x * cos + sin)


X = torch.randn(B, T, 12, dtype=torch.float64)


def only(subject, expects=None):
    """The likeliest way of calling."""
    return next(iter(iterate_adapters(subject, expects or Everything())))


def test_a_module_is_called_with_x():
    layer = SelfAttention(12, 5).double()
    torch.testing.assert_close(only(layer).call(X).context, layer(X))


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_fed_by_its_own_batch_first(batch_first):
    torch.manual_seed(0)
    layer, other = (nn.MultiheadAttention(12, 3, batch_first=first).double() for first in (batch_first, True))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(only(layer).call(X).context, other(X, X, X)[0])


@pytest.mark.parametrize("expects", [Causal(), Padding((3, 6)), Causal() & Padding((3, 6))])
def test_what_takes_a_mask_and_holds_none_is_handed_the_expectation(expects):
    layer = nn.MultiheadAttention(12, 3, batch_first=True).double()
    weights = only(layer, expects).call(X).weights
    hidden = ~expects.table(T, T).expand(B, 3, T, T)
    assert (weights[hidden] == 0).all()
    assert (weights[~hidden] > 0).all()


def test_a_module_of_query_key_and_value_is_called_with_x_three_times():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 12))

        def forward(self, query, key, value, mask=None):
            return F.scaled_dot_product_attention(query @ self.weight, key, value)

    layer = Three().double()
    torch.testing.assert_close(only(layer).call(X).context, layer(X, X, X))


@pytest.mark.parametrize("axes", [3, 2])
def test_a_function_of_fewer_axes_is_called_head_by_head_or_sequence_by_sequence(axes):
    def function(q, k, v):
        if q.dim() != axes:
            raise ValueError(f"takes {axes} axes")
        return (q @ k.mT).softmax(-1) @ v

    q, k, v = torch.randn(3, B, 1, T, 8, dtype=torch.float64)
    way = next(way for way in iterate_adapters(function, Everything()) if way.rank == axes)
    torch.testing.assert_close(way.call(q, k, v).context, (q @ k.mT).softmax(-1) @ v)


def test_a_module_for_one_sequence_is_called_with_each():
    layer = lectures_classes.SelfAttentionV1(D_IN, 5).double()
    case = case_of(layer, Everything())
    assert not case.subject.is_batched
    (x,) = case.make_inputs()
    torch.testing.assert_close(case.run_subject(x).context, torch.stack([layer(each) for each in x]))


@pytest.mark.slow
def test_what_torch_compile_made_is_examined_as_its_original_and_kept_beside_it():
    layer = copy.deepcopy(CAUSAL).double()
    subject = only(torch.compile(layer, backend="eager"))
    assert subject.module is layer
    x = torch.randn(B, T, D_IN, dtype=torch.float64)
    torch.testing.assert_close(subject.compiled(x).context, layer(x))


@dataclass
class Record:
    """What a layer may return."""

    hidden: torch.Tensor
    weights: torch.Tensor


def test_the_context_is_found_among_what_is_returned():
    context, weights = torch.randn(B, T, 5), torch.rand(B, T, T).softmax(-1)
    several = weights.unsqueeze(1).expand(B, 3, T, T)
    for returned in ((weights, context), {"weights": weights, "context": context}, Record(context, weights)):
        answer = extract_output(returned, T, (B, T))
        assert answer.context is context
        assert answer.weights is weights
    assert extract_output((several, context), T, (B, T)).context is context
    assert extract_output((context, torch.randn(B, 3, T, T), several), T, (B, T)).weights is several
    assert extract_output((context, several.transpose(0, 1)), T, (B, T)).weights is None


@pytest.mark.parametrize(
    ("function", "order"),
    [
        (lambda keys, queries, values: (keys, queries, values), "kqv"),
        (lambda v, k, q: (v, k, q), "vkq"),
        (lambda inputs_q, inputs_k, inputs_v: (inputs_q, inputs_k, inputs_v), "qkv"),
        (lambda a, b, c: (a, b, c), "qkv"),
    ],
)
def test_q_k_and_v_are_given_by_the_names_of_the_arguments(function, order):
    inputs = dict(zip("qkv", torch.randn(3, B, 3, T, 8), strict=True))
    found = []
    only(noting(function, found)).call(*inputs.values())
    assert [next(role for role, x in inputs.items() if x is one) for one in found] == list(order)


def noting(function, found):
    """A function of the same arguments that notes what it is given."""

    @functools.wraps(function)
    def note_inputs(*given):
        found.extend(function(*given))
        return given[0]

    return note_inputs


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_partial_of_multihead_attention_is_called_with_x_three_times(batch_first):
    torch.manual_seed(0)
    hidden = later(T, T)
    layer, other = (nn.MultiheadAttention(12, 3, batch_first=first).double() for first in (batch_first, True))
    other.load_state_dict(layer.state_dict())
    found = only(functools.partial(layer, attn_mask=hidden)).call(X).context
    torch.testing.assert_close(found, other(X, X, X, attn_mask=hidden)[0])


def test_weights_are_taken_where_they_are_returned():
    context, weights = torch.randn(B, T, 5), torch.rand(B, T, T)
    for returned in ((context, weights), [context, None, weights], {"context": context, "weights": weights}):
        answer = extract_output(returned, T)
        assert answer.context is context
        assert answer.weights is weights
    assert extract_output((context, None), T).weights is None
    assert extract_output((context, torch.rand(B, T + 1, T)), T).weights is None
    assert extract_output((context, (torch.randn(B, 3, T, 4), torch.randn(B, 3, T, 4))), T).weights is None


@pytest.mark.parametrize(
    ("subject", "says"),
    [
        (MultiHeadAttention, "Make one: MultiHeadAttention"),
        (3, "got 3"),
        (None, r"got None\.$"),
        (lambda x, mask: x, "takes x, mask"),
        (lambda: 0, "takes no required argument"),
        (lambda x, *, mask: x, "takes x, mask="),
        (Turned(), "takes x, cos, sin"),
        (nn.MultiheadAttention(12, 3, kdim=8, vdim=6), "keys of width 8, values of 6"),
    ],
)
def test_what_cannot_be_called_gets_the_line_to_write(subject, says):
    with pytest.raises(ConfigError, match=says):
        list(iterate_adapters(subject, Causal()))


@pytest.mark.parametrize("has_source", [True, False])
def test_a_layer_that_cannot_do_without_its_optional_source_is_given_x_twice(has_source):
    """As torchtune's MultiHeadAttention, which makes keys and values from y."""

    class FromSource(Layer):
        def __init__(self):
            super().__init__(hiding(later))

        def forward(self, x, y=None):
            if has_source and y is None:
                raise AttributeError("'NoneType' object has no attribute 'shape'")
            return super().forward(x)

    report = examine(FromSource(), expects=Causal())
    assert not report.findings
    assert ("x, y = x" in str(report)) == has_source
