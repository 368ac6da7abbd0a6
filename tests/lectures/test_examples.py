import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from bounds import assert_within, softmax_bound, sum_bound
from regard import ConfigError, ShapeError, TooLargeError
from regard.lectures.custom_example import build_custom_example, draw_weights, make_vectors
from regard.lectures.examples import EXAMPLES, build_example, show_renormalized_weights, summarize_example
from regard.lectures.printed_numbers import get_printed_example, load_printed_numbers, parse_tensor
from regard.lectures.score_scaling import KEYS, NUMBERS, WIDTHS, measure_scores, softmax_gradients
from regard.lectures.softmax_forms import VECTORS
from regard.mechanism import Causal, attend

STEPS = {  # example: the lectures' figure, and the steps that it prints
    "simple": ("simple-all", ("scores", "weights", "context")),
    "trainable": ("trainable-parameters", ("scores", "scaled", "weights", "context")),
    "causal": ("causal-minus-infinity", ("weights",)),
    "dropout": ("dropout-weights", ("dropped",)),
    "split": ("multi-head-split", ("weights",)),
    "dog": ("dog-self-attention", ("scores", "scaled", "weights", "context")),
    "leak": ("dog-leaky-mask", ("masked", "weights", "context")),
}


PRINTED = load_printed_numbers()["tolerance"]  # half a unit of the fourth decimal, and a little more: 6e-5


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_an_example_are_the_numbers_the_lectures_print(name):
    printed, steps = get_printed_example(STEPS[name][0]), build_example(name).steps
    for step in STEPS[name][1]:
        allowed = printed.get("tolerance", PRINTED)
        torch.testing.assert_close(getattr(steps, step), parse_tensor(printed[step]), atol=allowed, rtol=0)


def test_the_stacked_heads_side_by_side_are_the_printed_context():
    joined = build_example("heads").after[-1].panels[0].values
    torch.testing.assert_close(
        joined, parse_tensor(get_printed_example("multi-head-stacked")["context"])[0], atol=PRINTED, rtol=0
    )


def test_the_leak_holds_the_right_weights_beside_the_wrong_ones():
    leak = build_example("leak")
    torch.testing.assert_close(
        leak.right.weights, parse_tensor(get_printed_example("dog-leaky-mask")["correct_weights"]), atol=PRINTED, rtol=0
    )
    assert "WRONG" in leak.sentences["masked"]
    assert (leak.steps.weights.triu(1).sum(-1)[:-1] > 0.07).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_leaves_the_random_state_as_it_was_and_is_the_same_twice(name):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = build_example(name), build_example(name)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first.before + first.after, second.before + second.after, strict=True):
        for panel, same in zip(one.panels, other.panels, strict=True):
            torch.testing.assert_close(panel.values, same.values, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def double_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("name", STEPS)
def test_the_default_dtype_of_the_caller_changes_no_example(name):
    test_the_steps_of_an_example_are_the_numbers_the_lectures_print(name)
    assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_prints_nothing_names_a_next_one_and_labels_every_number(name, capsys):
    one = build_example(name)
    assert capsys.readouterr().out == ""
    assert one.name == name
    assert one.leads_to in EXAMPLES
    assert summarize_example(name).endswith(".")
    for scene in one.before + one.after:
        for panel in scene.panels:
            assert panel.values.shape == (len(panel.rows), len(panel.columns))
            assert not panel.values.requires_grad


def test_an_unknown_example_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean causal"):
        build_example("causl")


def test_the_variance_of_a_dot_product_is_d_and_near_1_once_divided():
    """Within 5 standard errors. Given q the variance is |q|², itself d ± √(2 d); that of n numbers is off by √(2 / n)."""
    for width in WIDTHS:
        queries = min(4096, NUMBERS // (KEYS * width))
        error = math.sqrt(2 / (width * queries) + 2 * (1 + 2 / width) / (queries * KEYS))
        plain, scaled = measure_scores(width)
        assert plain.variance == pytest.approx(width, rel=5 * error)
        assert scaled.variance == pytest.approx(1, rel=5 * error)


def test_undivided_scores_collapse_the_softmax_and_its_gradient():
    plain, scaled = measure_scores(4096)
    assert plain.largest > 0.95 > 0.4 > scaled.largest
    assert plain.entropy < 0.1 < 2 < scaled.entropy
    assert plain.gradient < scaled.gradient / 5


def test_the_gradient_measured_is_that_of_automatic_differentiation():
    scores = torch.randn(3, 5, dtype=torch.float64)
    expected = torch.func.vmap(torch.func.jacrev(partial(torch.softmax, dim=-1)))(scores)
    torch.testing.assert_close(softmax_gradients(scores), expected)


def test_each_softmax_form_breaks_where_the_example_says_so():
    weights = {scene.name: scene.panels[0].values for scene in build_example("softmax").before}
    by_sum, naive, stable, blockwise = range(4)
    assert (weights["a negative sum"][by_sum] < 0).any()
    assert weights["scores near 1000"][naive].isnan().all()
    assert weights["scores near -1000"][naive].isnan().all()
    assert weights["scores far apart"][stable][1] == 0
    for name, values in weights.items():
        allowed = softmax_bound(torch.float32, torch.tensor(VECTORS[name][0]), 2)  # a block has a maximum of its own before
        allowed = torch.cat([allowed, allowed.sum(-1, keepdim=True) + sum_bound(torch.float32, 3)])
        assert_within(values[blockwise], values[stable], allowed, name)


def test_ones_own_words_attend_as_the_formula_says():
    x = torch.randn(3, 5)
    one = build_custom_example(("a", "b", "c"), x, Causal())
    assert torch.equal(one.steps.context, attend(x, x, x, Causal(), scale=1.0).context)
    weights = draw_weights(5, 2, seed=1)
    two = build_custom_example(("a", "b", "c"), x, weights=weights, count=2)
    assert two.steps.weights.shape == (2, 3, 3)
    weight = weights.query.weight[:, 2:].double()
    assert_within(two.q[1], x.double() @ weight, sum_bound(torch.float32, 5) * (x.double().abs() @ weight.abs()))


def test_equal_words_share_a_random_vector_and_known_words_keep_theirs():
    x, drawn = make_vectors(("a", "b", "a", "c"), {"b": torch.tensor([1.0, 2.0])}, 2, seed=3)
    assert drawn == ("a", "c")
    assert torch.equal(x[0], x[2])
    assert x[1].tolist() == [1, 2]
    assert not torch.equal(make_vectors(("a",), {}, 2, seed=4)[0], make_vectors(("a",), {}, 2, seed=5)[0])


def test_words_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="2 words, but 3 vectors"):
        build_custom_example(("a", "b"), torch.ones(3, 2))
    with pytest.raises(ShapeError, match="4 numbers each, but W_query takes 5"):
        build_custom_example(("a",), torch.ones(1, 4), weights=draw_weights(5, 1, 0))
    with pytest.raises(ConfigError, match="cannot be split evenly into 3 heads"):
        build_custom_example(("a",), torch.ones(1, 4), weights=draw_weights(4, 1, 0), count=3)
    with pytest.raises(TooLargeError, match="at most 2048"):
        build_custom_example(("a",) * 3000, torch.ones(1, 1).expand(3000, 1))


@pytest.mark.slow
def test_examples_built_at_the_same_time_draw_as_each_alone():
    drawn = ("trainable", "dropout", "heads", "split", "additive")
    alone = {name: build_example(name).steps.context for name in drawn}
    with ThreadPoolExecutor(4) as threads:
        for name, made in [(name, threads.submit(build_example, name)) for name in drawn * 40]:
            assert torch.equal(made.result().steps.context, alone[name]), name


def test_the_difference_of_the_two_recipes_is_written_alike_on_every_processor():
    def sentences(steps):
        return {scene.sentence for scene in [show_renormalized_weights(build_example("causal").words, steps)]}

    steps = build_example("causal").steps
    off = dataclasses.replace(steps, **{name: step * (1 + 3 * torch.finfo(step.dtype).eps) for name, step in steps.items()})
    assert sentences(steps) == sentences(off)
    assert "(in float64 to 1e-12)" in sentences(steps).pop()
