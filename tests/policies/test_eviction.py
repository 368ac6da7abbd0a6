"""H2O and TOVA evict what their algorithms, written out step by step for one head, evict."""

import pytest
import torch

from policies.reference import B, G, P, R, T, best, dense_weights, make_inputs, table, weigh
from regard import Causal, ConfigError, Window
from regard.policies import H2O, TOVA


def run_h2o(inputs, b, g, budget, recent):
    """The keys that each later query uses, in one key head."""
    sums = dense_weights(inputs)[b, g * R : (g + 1) * R, :P, :P].sum((0, 1)).tolist()
    old = best(sums[: P - recent], budget - recent)
    cache = sorted(old | set(range(P - recent, P)))
    used = []
    for i in range(P, T):
        cache.append(i)
        sums.append(0.0)
        used.append(set(cache))
        for head in range(g * R, (g + 1) * R):
            for key, weight in zip(cache, weigh(inputs.q[b, head, i], inputs.k[b, g, cache]).tolist(), strict=True):
                sums[key] += weight
        cache.remove(min((key for key in cache if key <= i - recent), key=lambda key: sums[key]))
    return used


def run_tova(inputs, b, budget):
    last = dense_weights(inputs)[b, :, P - 1, : P - 1].mean(0).tolist()
    cache = [*sorted(best(last, budget - 1)), P - 1]
    used = []
    for i in range(P, T):
        cache.append(i)
        used.append(set(cache))
        rows = [weigh(inputs.q[b, head, i], inputs.k[b, head // R, cache]) for head in range(G * R)]
        mean = torch.stack(rows).mean(0).tolist()
        cache.remove(min(zip(mean[:-1], cache[:-1], strict=True))[1])
    return used


def rows_of(found, b, h):
    return [set(row.nonzero().flatten().tolist()) for row in found[b, h, P:]]


@pytest.mark.parametrize(("budget", "recent"), [(11, 3), (2, 1), (7, 0)])
def test_h2o_evicts_the_key_with_the_smallest_sum(budget, recent):
    inputs = make_inputs(budget)
    found = table(H2O(budget, recent), inputs)
    for b in range(B):
        for g in range(G):
            for r in range(R):
                assert rows_of(found, b, g * R + r) == run_h2o(inputs, b, g, budget, recent)


@pytest.mark.parametrize("budget", [1, 2, 13])
def test_tova_evicts_the_key_with_the_smallest_weight_of_the_last_query(budget):
    inputs = make_inputs(budget)
    found = table(TOVA(budget), inputs)
    for b in range(B):
        for h in range(G * R):
            assert rows_of(found, b, h) == run_tova(inputs, b, budget)


@pytest.mark.parametrize("policy", [H2O(11, 3), TOVA(13), H2O(((5, 9),), 2), H2O(41, 5), TOVA(60)])
def test_the_compiled_cache_is_the_plain_one(policy, monkeypatch):
    inputs = make_inputs(7, dtype=torch.float32)
    found = table(policy, inputs)
    monkeypatch.setattr("regard.compiled.processor.has_numba", lambda: False)
    assert torch.equal(found, table(policy, inputs))


def test_a_sliding_window_softcap_and_sinks_of_the_model_change_the_weights():
    settings = {"mask": Causal() & Window(8), "softcap": 2.0, "sinks": torch.randn(G * R, dtype=torch.float64), "scale": 1.5}
    inputs = make_inputs(**settings)
    found = table(TOVA(9), inputs)
    complete = inputs.build_map().dense()
    cache = None
    for i in range(P, T):
        if cache is None:
            last = complete[0, :, P - 1, : P - 1].mean(0).tolist()
            cache = [*sorted(best(last, 8)), P - 1]
        cache.append(i)
        assert rows_of(found, 0, 0)[i - P] == {key for key in cache if key >= i - 8}
        k = inputs.k[0].repeat_interleave(R, 0)[:, cache]
        scores = 2 * torch.tanh((k @ inputs.q[0, :, i].unsqueeze(-1)).squeeze(-1) * 1.5 / 2)
        scores[:, [key < i - 8 for key in cache]] = -torch.inf
        mean = torch.cat([scores, settings["sinks"].view(-1, 1)], 1).softmax(-1)[:, :-1].mean(0)
        cache.remove(min(zip(mean[:-1].tolist(), cache[:-1], strict=True))[1])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: H2O(0.0), "above 0 and at most 1"),
        (lambda: H2O(4, 4).choose_keys(make_inputs()), "fewer than its budget"),
        (lambda: TOVA(((3, 4),)).choose_keys(make_inputs()), "one budget for each layer"),
        (lambda: TOVA(3).choose_keys(make_inputs(bias=torch.zeros(1, 1, 1, 1, dtype=torch.float64))), "ALiBi"),
        (lambda: H2O(3).choose_keys(make_inputs(prompt=0)), "a prompt of at least 1"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
