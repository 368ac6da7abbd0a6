import pytest
import torch
import torch.nn.functional as F

from regard import AttentionMap, Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.map.visible_pixels import find_visible_pixels

Q, K, SIDE = 31, 37, 5
TABLE = torch.rand(2, 3, Q, K, generator=torch.Generator().manual_seed(5)) < 0.02
RULES = [
    Everything(),
    Causal(),
    Window(3, 2),
    ~Causal(),
    Prefix(7) | Window(0, 0),
    Padding([11, 29]),
    Causal() & Documents(torch.arange(K) // 9),
    Given(TABLE),
]


def pixels(table):
    """Whether a block of the table has anything in it, block by block."""
    padded = F.pad(table.float(), (0, -K % SIDE, 0, -Q % SIDE))
    return F.max_pool2d(padded[None, None], SIDE)[0, 0] > 0


@pytest.mark.parametrize("bias", [None, -torch.inf, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("offset", [0, 6, -4])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_pixel_is_visible_where_one_of_its_entries_is(rule, offset, bias):
    shown = rule.table(Q, K, offset).expand(2, 3, Q, K)[1, 2]
    hidden = torch.rand(Q, K, generator=torch.Generator().manual_seed(1)) < 0.9
    added = None if bias is None else make_hiding_bias(hidden, bias)
    m = AttentionMap(torch.zeros(2, 3, Q, 4), torch.zeros(2, 3, K, 4), rule, offset=offset, bias=added)
    (plane,) = m.select(1, 2).planes
    edges = [(torch.arange(-(-size // SIDE) + 1) * SIDE).clamp(max=size) for size in (Q, K)]
    expected = pixels(shown if bias is None else shown & ~hidden)
    found = find_visible_pixels(plane, *edges, torch.ones_like(expected))
    assert torch.equal(found, expected)
    some = torch.rand(expected.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    assert torch.equal(find_visible_pixels(plane, *edges, some), expected & some)


def make_hiding_bias(table, number):
    """A bias that hides entries, -inf or a number so low that nothing is left of a weight."""
    return torch.zeros(1, 1, Q, K).masked_fill(table, number)
