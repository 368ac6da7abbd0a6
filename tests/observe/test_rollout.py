import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bounds import sum_bound
from dense import Recorded, close
from regard import AttentionMap, Causal, ConfigError, Given, Padding, ShapeError, TooLargeError, Window
from regard.observe import rollout as room
from regard.observe.rollout import iterate_rollouts, rollout
from show.vision_models import swin

B, H, T, D = 2, 3, 19, 5
RULES = [
    Causal(),
    Window(4, 0),
    Padding([T - 3, T]),
    Causal() & Given((torch.arange(T) >= torch.tensor([[5], [0]])).view(B, 1, 1, T)),
]


def maps(mask=None, layers=3, seed=1, **options):
    torch.manual_seed(seed)
    mask = Causal() if mask is None else mask
    return [AttentionMap(*torch.randn(2, B, H, T, D).double(), mask, **options) for _ in range(layers)]


def compute_rollout(maps, residual=0.5):
    """Â_L ... Â_1 as a matrix, (b, t, t)."""
    product = torch.eye(T, dtype=torch.float64)
    for m in maps:
        layer = (1 - residual) * m.dense().mean(1) + residual * torch.eye(T, dtype=torch.float64)
        product = layer / layer.sum(-1, keepdim=True) @ product
    return product


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rollout_is_the_product_of_the_matrices(rule):
    found = rollout(Recorded(maps(rule)))
    close(found, compute_rollout(maps(rule)))
    close(found.sum(-1), torch.ones(B, T))


def test_a_sink_takes_nothing_out_of_a_row():
    sinks = torch.randn(H).double()
    close(rollout(Recorded(maps(sinks=sinks))), compute_rollout(maps(sinks=sinks)))


@settings(max_examples=15)
@given(st.lists(st.integers(-T, T - 1), min_size=1, max_size=7), st.sampled_from([0.0, 0.3, 0.5]))
def test_some_queries_are_their_rows(queries, residual):
    close(rollout(Recorded(maps()), queries, residual=residual), compute_rollout(maps(), residual)[:, queries])


@pytest.mark.parametrize("queries", [-1, slice(3, 9), torch.tensor([2, 2])])
def test_queries_are_named_in_any_way(queries):
    expected = compute_rollout(maps())[:, torch.arange(T)[queries].reshape(-1)]
    close(rollout(Recorded(maps()), queries), expected)


def test_many_rows_go_through_in_parts(monkeypatch):
    monkeypatch.setattr(room, "ROWS", 4)
    close(rollout(Recorded(maps())), compute_rollout(maps()))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_rollouts_of_all_layers_are_the_products_so_far(rule):
    sinks = torch.randn(H).double()
    for options in ({}, {"sinks": sinks}):
        made = maps(rule, **options)
        found = list(iterate_rollouts(Recorded(made)))
        assert len(found) == 3
        for count, one in enumerate(found, 1):
            close(one, compute_rollout(made[:count]))


def test_some_layers_are_rolled_out_in_the_order_they_are_named():
    close(rollout(Recorded(maps()), layers=["layer.0", 2]), compute_rollout([maps()[0], maps()[2]]))


def test_more_rows_than_fit_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(room, "LIMIT_BYTES", 8 * B * T * 5)
    assert rollout(Recorded(maps()), slice(5)).shape == (B, 5, T)
    with pytest.raises(TooLargeError, match=r"rollout\(recording, \[-1\]\)"):
        rollout(Recorded(maps()), slice(6))


def test_what_is_no_text_on_itself_is_refused():
    wide = AttentionMap(torch.randn(B, H, T, D), torch.randn(B, H, T + 1, D))
    with pytest.raises(ShapeError, match=r"layer 0 is AttentionMap\(2, 3, 19, 20\)"):
        rollout(Recorded([wide]))
    with pytest.raises(ShapeError, match="at position 3"):
        rollout(Recorded(maps(offset=3)))
    with pytest.raises(ConfigError, match="no layer"):
        rollout(Recorded([]))
    with pytest.raises(ConfigError, match="residual"):
        rollout(Recorded(maps()), residual=1)


@pytest.mark.slow
def test_a_row_of_20000_tokens_is_rolled_out_without_a_matrix():
    t = 20_000
    torch.manual_seed(0)
    previous = torch.randn(t, 16)
    previous /= previous.norm(dim=-1, keepdim=True)
    q = previous.roll(1, 0)
    recording = Recorded([AttentionMap(q, previous, Causal(), scale=1000.0)] * 2)  # each layer looks one token back
    found = rollout(recording, [-1])
    likeness = (q[-3:].double() @ previous.double().T).topk(2).values
    leak = t * float(torch.exp(-1000 * (likeness[:, 0] - likeness[:, 1])).max())  # what all other keys take at most
    close(found[0, 0, -3:], [0.25, 0.5, 0.25], atol=2 * leak + sum_bound(torch.float32, t))


def test_layers_of_as_many_tokens_that_are_other_patches_are_refused():
    found = swin()[0]
    with pytest.raises(ShapeError, match="those of layer 1 are other patches"):
        rollout(found, layers=[0, 1])
    with pytest.raises(ShapeError, match="those of layer 1 are other patches"):
        next(iterate_rollouts(found))
    assert rollout(found, [0], layers=[1]).shape == (4, 1, 16)
