import itertools

import numpy as np
import pytest
import torch

from regard import Causal, ConfigError, Documents, Given, Padding, ShapeError, attend, attention
from regard.mechanism.scores import score_dtype

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = pytest.mark.parametrize("form", [attend, attention])


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q, K, V = (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 13)


@FORMS
@pytest.mark.parametrize(
    ("q", "k", "v", "says"),
    [
        (Q, (2, 2, 7, 11), V, r"k is \(b, g, k, d\) = \(2, 2, 7, 11\): its d is 11, but q's is 8"),
        (Q, (1, 3, 7, 8), V, "its b is 1, but q's is 2"),
        (Q, (2, 2, 7, 8), (2, 2, 7, 13), "its g is 2, which does not divide q's h, 3"),
        (Q, K, (2, 1, 7, 13), r"v is .* its b, g and k must be k's, \(2, 3, 7\)"),
        (Q, K, (2, 3, 6, 13), "its b, g and k must be k's"),
        (Q, (3, 7, 8), V, r"all \(h, t, d\) .* q has 4 axes, k is \(3, 7, 8\)"),
        ((3, 5, 8), K, V, r"all \(h, t, d\) .* q has 3 axes, k is \(2, 3, 7, 8\)"),
        ((8,), (8,), (8,), "q has 1 axes"),
        ((1, 1, 3, 0), (1, 1, 3, 0), (1, 1, 3, 2), "width d of 0"),
    ],
)
def test_shapes_that_do_not_agree_say_which_axis_and_what_came(form, q, k, v, says):
    with pytest.raises(ShapeError, match=says):
        form(zeros(*q), zeros(*k), zeros(*v))


@FORMS
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mask": Padding([1, 2, 3])}, ShapeError, r"is for \(b, h\) = \(3, 1\), but q has \(2, 3\)"),
        ({"mask": Given(torch.ones(2, 5, 7) > 0)}, ShapeError, r"\(1, 2\), but q has"),
        ({"mask": Documents([0, 1])}, ShapeError, "ids for 2 keys, but there are 7"),
        ({"mask": torch.ones(5, 7) > 0}, ConfigError, r"got a tensor of torch.bool \(5, 7\). Pass a bool tensor as Given"),
        ({"mask": torch.ones(5, 7)}, ConfigError, "added to the scores as bias="),
        ({"mask": None}, ConfigError, r"Use Everything\(\) to hide nothing"),
        ({"mask": Causal}, ConfigError, r"got the class Causal. Write Causal\(\)"),
        ({"softcap": 0.0}, ConfigError, "softcap must be above 0 and finite, or None"),
        ({"dropout": 1.0}, ConfigError, "at least 0 and below 1; got 1.0"),
        ({"dropout": -0.1}, ConfigError, "probability"),
        ({"softcap": float("inf")}, ConfigError, "finite, or None"),
        ({"scale": float("nan")}, ConfigError, "scale must be finite"),
        ({"scale": -3.5e38}, ConfigError, "scale must be finite in float32"),
        ({"scale": torch.ones(())}, ConfigError, r"attention\(q \* scale"),
        ({"dropout": None}, ConfigError, "probability"),
        ({"sinks": [0.0, 0.0, 0.0]}, ConfigError, "sinks must be a tensor, got a list"),
        ({"sinks": torch.ones(3).bool()}, ConfigError, "sinks must be a dense tensor of float16.* got a tensor of torch.bool"),
        ({"bias": zeros(5, 6)}, ShapeError, r"\(2, 3, 5, 7\), got \(1, 1, 5, 6\)"),
        ({"bias": zeros(1, 1, 1, 5, 7)}, ShapeError, "must broadcast"),
        ({"bias": torch.ones(5, 7) > 0}, ConfigError, r"Pass a bool table as mask=Given"),
        ({"sinks": zeros(2)}, ShapeError, r"one for each head: expected \(3,\), got \(2,\)"),
        ({"offset": torch.tensor([1, 2, 3])}, ShapeError, r"\(2,\); got \(3,\)"),
        ({"offset": torch.tensor([1.0, 2.0])}, ConfigError, "int64"),
        ({"offset": 1.5}, ConfigError, "int64 tensor .* got 1.5"),
    ],
)
def test_settings_that_cannot_be_say_what_was_expected(form, options, error, says):
    with pytest.raises(error, match=says):
        form(zeros(*Q), zeros(*K), zeros(*V), **options)


@FORMS
def test_one_floating_dtype_is_asked_of_q_k_and_v(form):
    with pytest.raises(ConfigError, match=r"torch.float32, torch.float64 and torch.float32. Use .to"):
        form(zeros(*Q), zeros(*K, dtype=torch.float64), zeros(*V))
    with pytest.raises(ConfigError, match="one floating dtype"):
        form(*(zeros(*shape, dtype=torch.int64) for shape in (Q, K, V)))


@FORMS
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATING, repeat=3)), ids=str)
def test_q_k_and_v_of_any_dtypes_are_computed_if_they_are_one_and_refused_otherwise(form, dtypes):
    q, k, v = (zeros(*shape, dtype=dtype) for shape, dtype in zip((Q, K, V), dtypes, strict=True))
    if len(set(dtypes)) == 1:
        found = form(q, k, v)
        assert getattr(found, "context", found).dtype == dtypes[0]
        return
    with pytest.raises(ConfigError, match=r"one floating dtype|Use \.to"):
        form(q, k, v)


@FORMS
@pytest.mark.parametrize(("of_q", "of_more"), list(itertools.product(FLOATING, FLOATING)), ids=str)
def test_a_bias_and_sinks_of_any_dtype_are_cast_to_that_of_the_scores(form, of_q, of_more):
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape).to(of_q) for shape in (Q, K, V))
    bias, sinks = torch.randn(Q[2], K[2]).to(of_more), torch.randn(Q[1]).to(of_more)
    wide = score_dtype(of_q)
    found = form(q, k, v, bias=bias, sinks=sinks)
    expected = form(q, k, v, bias=bias.to(wide), sinks=sinks.to(wide))
    found, expected = (getattr(one, "context", one) for one in (found, expected))
    assert found.dtype == of_q
    assert torch.equal(found, expected)


@FORMS
def test_what_is_no_tensor_is_named(form):
    with pytest.raises(ConfigError, match=r"q, k and v must be tensors, got .* \(2, 3, 7, 8\), None"):
        form(zeros(*Q), zeros(*K), None)


@FORMS
def test_an_offset_may_be_a_whole_number_of_any_kind(form):
    q, k, v = (torch.randn(shape) for shape in (Q, K, V))
    found = form(q, k, v, Causal(), offset=np.int64(2))
    expected = form(q, k, v, Causal(), offset=2)
    for a, b in ((found, expected),) if form is attention else ((found.context, expected.context),):
        assert torch.equal(a, b)


@FORMS
def test_all_tensors_are_asked_to_be_on_one_device(form):
    with pytest.raises(ConfigError, match="one device, got cpu, meta and cpu"):
        form(zeros(*Q), zeros(*K).to("meta"), zeros(*V))
