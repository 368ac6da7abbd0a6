"""SnapKV, ObservedAttention, Knorm and ExpectedAttention keep what their formulas, written out by head, say."""

import copy
from dataclasses import dataclass

import pytest
import torch

from policies.reference import B, D, G, P, R, T, best, dense_weights, list_keys_after_prompt, make_inputs, table
from regard import Causal, ConfigError, ShapeError, Window
from regard.policies import ExpectedAttention, Knorm, ObservedAttention, PromptPolicy, SnapKV

HEADS = [(b, g, r) for b in range(B) for g in range(G) for r in range(R)]


def test_snapkv_keeps_its_window_and_the_keys_that_the_window_attends_to():
    inputs, budget, window, kernel = make_inputs(), 13, 5, 3
    weights = dense_weights(inputs)
    kept = list_keys_after_prompt(SnapKV(budget, window, kernel), inputs)
    for b, g, r in HEADS:
        mean = weights[b, g * R : (g + 1) * R, P - window : P, : P - window].mean((0, 1)).tolist()
        smooth = [sum(mean[max(j - 1, 0) : j + 2]) / kernel for j in range(len(mean))]
        assert kept[b][g * R + r] == best(smooth, budget - window) | set(range(P - window, P))


def test_observed_attention_keeps_the_keys_with_the_largest_mean_weight():
    inputs, budget = make_inputs(1), 7
    weights = dense_weights(inputs)[:, :, :P, :P]
    kept = list_keys_after_prompt(ObservedAttention(budget), inputs)
    for b, g, r in HEADS:
        columns = weights[b, g * R : (g + 1) * R].mean(0)
        assert kept[b][g * R + r] == best([float(columns[j:, j].mean()) for j in range(P)], budget)


def test_observed_attention_in_a_sliding_window_takes_the_mean_over_the_queries_that_see_a_key():
    width, budget = 9, 7
    inputs = make_inputs(1, mask=Causal() & Window(left=width - 1))
    weights = inputs.select_prompt().build_map().dense()
    kept = ObservedAttention(budget).choose_keys(inputs).block(torch.tensor([P]), torch.arange(P))[:, :, 0]
    for b, g, r in HEADS:
        columns = weights[b, g * R : (g + 1) * R].mean(0)
        means = [float(columns[j : j + width, j].mean()) for j in range(P)]
        assert set(kept[b, g * R + r].nonzero().flatten().tolist()) == best(means, budget)


def test_knorm_keeps_the_shortest_keys():
    inputs = make_inputs(2)
    kept = list_keys_after_prompt(Knorm(0.5), inputs)
    for b, g, r in HEADS:
        assert kept[b][g * R + r] == best([-float(key.square().sum()) for key in inputs.k[b, g, :P]], int(P * 0.5))


def test_expected_attention_keeps_the_keys_that_a_normal_query_attends_to():
    inputs, budget, sinks = make_inputs(3), 11, 2
    kept = list_keys_after_prompt(ExpectedAttention(budget, sinks), inputs)
    for b, g, r in HEADS:
        expected = torch.zeros(P - sinks, dtype=torch.float64)
        for head in range(g * R, (g + 1) * R):
            queries, keys = inputs.q[b, head, sinks:P], inputs.k[b, g, sinks:P]
            covariance = torch.cov(queries.T, correction=0)
            logits = [k @ queries.mean(0) / D**0.5 + k @ covariance @ k / (2 * D) for k in keys]
            expected += torch.stack(logits).softmax(0) / R
        scores = expected * inputs.v[b, g, sinks:P].norm(dim=-1)
        assert kept[b][g * R + r] == {0, 1} | {sinks + j for j in best(scores.tolist(), budget - sinks)}


def test_expected_attention_turns_queries_to_later_positions():
    """Of queries that are one vector turned to each position, the mean is that vector turned to the mean of the future."""
    base, d, t, future = 100.0, 6, 9, 4
    vector = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def turn(position):
        pairs = [complex(float(vector[n]), float(vector[n + 3])) for n in range(3)]
        turned = [pair * complex(torch.exp(torch.tensor(1j * position * base ** (-2 * n / d)))) for n, pair in enumerate(pairs)]
        return torch.tensor([one.real for one in turned] + [one.imag for one in turned], dtype=torch.float64)

    q = torch.stack([turn(n) for n in range(t)])[None, None]
    mean, covariance = ExpectedAttention(3, sinks=0, future=future, rotary_base=base).describe_queries(q)
    expected = torch.stack([turn(n) for n in range(t, t + future)]).mean(0)
    torch.testing.assert_close(mean[0, 0], expected, rtol=1e-6, atol=1e-6)
    assert float(covariance.abs().max()) < 1e-12


@pytest.mark.parametrize("policy", [SnapKV(13, 5, 3), ObservedAttention(7), Knorm(3), ExpectedAttention(5)])
def test_the_prompt_is_complete_and_later_keys_stay(policy):
    found = table(policy, make_inputs())
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    assert torch.equal(found[:, :, :P], causal[:P].expand_as(found[:, :, :P]))
    later = causal[P:, P:].expand(B, G * R, -1, -1)
    assert torch.equal(found[:, :, P:, P:], later)
    assert (found[:, :, P:, :P] == found[:, :, P:, :P][:, :, :1]).all()


def test_a_budget_may_differ_between_layers_and_heads():
    budget = (5, (2, 0.5))
    sizes = [[len(one) for one in list_keys_after_prompt(Knorm(budget), make_inputs(layer=layer))[0]] for layer in (0, 1)]
    assert sizes == [[5] * G * R, [2] * R + [int(P * 0.5)] * R]


class Newest(PromptPolicy):
    """Keep the newest keys, and the first ones."""

    first: int = 0

    def score_keys(self, prompt):
        places = torch.arange(prompt.tokens).expand(len(prompt.k), prompt.k.shape[1], -1).float()
        return places.masked_fill(places < self.first, torch.inf)


@pytest.mark.parametrize("decorate", [lambda kind: kind, dataclass(frozen=True)], ids=["plain", "decorated"])
def test_a_policy_of_the_user_takes_ten_lines_and_a_parameter(decorate):
    policy = decorate(type("Own", (Newest,), {}))
    assert list_keys_after_prompt(policy(4), make_inputs())[1][2] == set(range(P - 4, P))
    assert list_keys_after_prompt(policy(4, first=1), make_inputs())[1][2] == {0, *range(P - 3, P)}
    assert policy(4, first=1).label == "Own(budget=4, first=1)"
    assert policy(4, first=1) != policy(4)
    assert {policy(4, 1), copy.deepcopy(policy(4, 1))} == {policy(4, 1)}
    with pytest.raises(ConfigError, match="at least 1"):
        policy(0, first=1)


class Shapeless(PromptPolicy):
    """Score all heads together, which is wrong."""

    def score_keys(self, prompt):
        return torch.zeros(prompt.tokens)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SnapKV(0), "at least 1, or a share of the prompt"),
        (lambda: Knorm(0.0), "above 0 and at most 1"),
        (lambda: Knorm(1.5), "above 0 and at most 1"),
        (lambda: Knorm(()), "a budget for each layer"),
        (lambda: SnapKV(5, kernel=4), "must be odd"),
        (
            lambda: SnapKV(5, window=6).choose_keys(make_inputs()),
            "not its window of 6 .* a window of at most 5,",
        ),
        (lambda: SnapKV(50, window=40).choose_keys(make_inputs()), "a window of at most 30,"),
        (lambda: Knorm((3,)).choose_keys(make_inputs(layer=1)), "for 1 layers"),
        (lambda: Knorm(((3, 4, 5),)).choose_keys(make_inputs()), "for 3 key heads"),
        (lambda: Shapeless(3).choose_keys(make_inputs()), "score_keys must return"),
        (lambda: ExpectedAttention(3, rotary_base=0.5), "above 1"),
        (lambda: ExpectedAttention(3, epsilon=-0.5), "at least 0 and finite"),
        (lambda: ExpectedAttention(3, epsilon=float("nan")), "at least 0 and finite"),
        (lambda: ExpectedAttention(3, epsilon="0"), "must be a number"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(make, says):
    with pytest.raises((ConfigError, ShapeError), match=says):
        make()
