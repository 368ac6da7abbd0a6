"""Oracle, Quest, BlockSparse and VerticalSlash choose what their formulas, written out, choose."""

from dataclasses import replace

import pytest
import torch

from policies.reference import B, D, G, P, R, T, best, dense_weights, make_inputs, table
from regard import Causal, ConfigError, Window
from regard.policies import BlockSparse, Knorm, Oracle, Quest, VerticalSlash


def test_the_oracle_keeps_the_largest_weights_of_each_query():
    inputs, n = make_inputs(), 5
    weights, found = dense_weights(inputs), table(Oracle(n), inputs)
    for b in range(B):
        for h in range(G * R):
            for i in range(P, T):
                assert set(found[b, h, i].nonzero().flatten().tolist()) == best(weights[b, h, i].tolist(), n)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5, 30, 44, T])
@pytest.mark.parametrize(
    "settings",
    [{}, {"mask": Causal() & Window(left=19)}, {"scale": -0.5}, {"softcap": 50.0}],
    ids=["plain", "window", "scale", "softcap"],
)
def test_the_oracle_in_float32_keeps_scores_that_none_of_the_others_exceeds(settings, count):
    """Scores of whole numbers are exact, and many are equal: which of these are kept is open."""
    made = make_inputs(dtype=torch.float32)
    inputs = replace(made, q=(made.q * 2).round(), k=(made.k * 2).round(), **settings)
    inputs.q[0, 0] = 0  # all scores are equal
    scores = inputs.q @ inputs.k.repeat_interleave(R, 1).mT * settings.get("scale", 1)
    found = table(Oracle(count), inputs)[:, :, P:]
    seen = inputs.mask.table(T, T)[P:]
    assert torch.equal(found.sum(-1), seen.sum(-1).clamp(max=count).expand(B, G * R, T - P))
    least = scores[:, :, P:].masked_fill(~found, torch.inf).amin(-1)
    assert (scores[:, :, P:].masked_fill(found | ~seen, -torch.inf).amax(-1) <= least).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [2.0**-66, 2.0**-74]
)  # scores that differ by less than the smallest quotient, and denormal ones
def test_the_oracle_keeps_the_largest_of_very_small_scores(size):
    made = make_inputs(dtype=torch.float32)
    inputs = replace(made, q=(made.q * 2).round() * size, k=(made.k * 2).round() * size, scale=1.0)
    scores = (inputs.q.double() @ inputs.k.double().repeat_interleave(R, 1).mT)[:, :, P:]
    found = table(Oracle(5), inputs)[:, :, P:]
    seen = inputs.mask.table(T, T)[P:]
    assert found.sum(-1).eq(5).all()
    least = scores.masked_fill(~found, torch.inf).amin(-1)
    assert (scores.masked_fill(found | ~seen, -torch.inf).amax(-1) <= least).all()


def test_no_policy_keeps_more_with_as_many_keys_as_the_oracle():
    inputs = make_inputs()
    weights = dense_weights(inputs)
    other = table(Knorm(6), inputs)
    for row in range(P, T):
        n = int(other[0, 0, row].sum())
        bound = (weights * table(Oracle(n), inputs))[:, :, row].sum(-1)
        assert ((weights * other)[:, :, row].sum(-1) <= bound + 1e-12).all()


def test_quest_reads_the_pages_with_the_largest_bounds_and_its_own():
    inputs, page, budget = make_inputs(), 5, 17  # three pages
    found = table(Quest(budget, page), inputs)
    for b in range(B):
        for h in range(G * R):
            for i in range(P, T):
                q, keys = inputs.q[b, h, i], inputs.k[b, h // R]
                bounds = [
                    sum(max(float(q[c] * k[:, c].min()), float(q[c] * k[:, c].max())) for c in range(D))
                    for k in keys[: i // page * page].split(page)
                ]
                pages = best(bounds, budget // page - 1) | {i // page}
                assert set(found[b, h, i].nonzero().flatten().tolist()) == {j for j in range(i + 1) if j // page in pages}


def test_block_sparse_attention_reads_the_blocks_with_the_largest_means():
    inputs, block, budget = make_inputs(prompt=47), 5, 19  # three blocks; the last block of the prompt is incomplete
    found = table(BlockSparse(budget, block), inputs)
    assert (found[:, :, 47:].sum(-1) == torch.arange(48, T + 1)).all()
    for b in range(B):
        for h in range(G * R):
            queries = [x.mean(0) for x in inputs.q[b, h, :47].split(block)]
            keys = [x.mean(0) for x in inputs.k[b, h // R, :47].split(block)]
            for i in range(47):
                own = i // block
                blocks = best([float(queries[own] @ key) for key in keys[:own]], budget // block - 1) | {own}
                assert set(found[b, h, i].nonzero().flatten().tolist()) == {j for j in range(i + 1) if j // block in blocks}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Oracle(0.0), "above 0 and at most 1"),
        (lambda: Quest(4, 5).choose_keys(make_inputs()), "not one page of 5: pass a larger budget"),
        (lambda: BlockSparse(4, 5).choose_keys(make_inputs()), "not one block of 5: pass a larger budget"),
        (lambda: Quest(page=0), "page"),
        (lambda: VerticalSlash(last=P + 1).choose_keys(make_inputs()), "got 31 of 53 .* a longer prompt, or a smaller last"),
        (lambda: VerticalSlash(last=99).choose_keys(make_inputs()), "at least 99 .* of a longer text, or a smaller last"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_query_of_the_prompt_reads_the_columns_and_the_diagonals():
    inputs, vertical, slash, last = make_inputs(), 4, 3, 5
    weights, found = dense_weights(inputs), table(VerticalSlash(vertical, slash, last), inputs)
    for b in range(B):
        for h in range(G * R):
            rows = range(P - last, P)
            columns = best([sum(float(weights[b, h, i, j]) for i in rows) for j in range(P)], vertical)
            sums = [sum(float(weights[b, h, i, i - d]) for i in rows if i >= d) for d in range(1, P)]
            distances = {0} | {d + 1 for d in best(sums, slash - 1)}
            for i in range(P):
                expected = {j for j in range(i + 1) if j in columns or i - j in distances}
                assert set(found[b, h, i].nonzero().flatten().tolist()) == expected
            for i in range(P, T):
                assert found[b, h, i].sum() == i + 1


@pytest.mark.parametrize("settings", [{"vertical": 0}, {"slash": 0}, {"last": 0}])
def test_counts_are_at_least_one(settings):
    with pytest.raises(ConfigError, match="VerticalSlash"):
        VerticalSlash(**settings)
