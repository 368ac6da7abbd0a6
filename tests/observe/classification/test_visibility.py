"""Small maps with equal masks share what their queries may see; others have it of their own."""

from dataclasses import dataclass

import pytest
import torch

from regard import AttentionMap, Causal, Everything, Given, Padding, Window
from regard.observe import detectors
from regard.observe.classification.head_scores import HeadOptions, estimate_heads
from regard.observe.classification.visibility import share_visibility
from regard.observe.map_view import MapView

B, H, T, D = 3, 2, 7, 5


@dataclass(frozen=True)
class Even(Causal):
    """A mask of a user's own: a query sees the earlier keys of even index, and itself."""

    def can_see(self, b, h, i, j, offset=0):
        return super().can_see(b, h, i, j, offset) & ((j % 2 == 0) | (i + offset == j))


def look_at(mask=None, *, seed=0, own=True, **options):
    """A view of a map of random queries and keys."""
    q, k = torch.randn(2, B, H, T, D, generator=torch.Generator().manual_seed(seed))
    return MapView(AttentionMap(q, k, Everything() if mask is None else mask, **options), own=own)


HIDING = torch.zeros(1, 1, T, T).masked_fill(torch.arange(T) == 2, -1e9)
PLAIN = {
    "everything": {},
    "causal": {"mask": Causal()},
    "a window": {"mask": Causal() & Window(3)},
    "an offset": {"mask": Causal(), "offset": 2},
    "cross attention": {"own": False},
}
BOUND = {
    "a table": {"mask": Given(torch.ones(T, T).tril().bool())},
    "padding": {"mask": Padding([T, 3, 5])},
    "a mask of one's own": {"mask": Even()},
    "numbers that hide": {"bias": HIDING},
    "infinity in a bias": {"bias": HIDING.masked_fill(HIDING < 0, -torch.inf)},
    "an offset of each row": {"mask": Causal(), "offset": torch.tensor([0, 1, 2])},
}


@pytest.mark.parametrize("name", PLAIN)
def test_maps_of_one_shape_with_equal_masks_of_a_few_numbers_share_what_is_seen(name):
    one, other = look_at(**PLAIN[name]), look_at(**PLAIN[name], seed=1, bias=torch.randn(1, H, T, T))
    assert one.visibility is other.visibility
    assert all(one.visibility is not look_at(**options).visibility for key, options in PLAIN.items() if key != name)


@pytest.mark.parametrize("name", [*PLAIN, *BOUND])
def test_which_queries_and_keys_count_is_that_of_each_map(name):
    options = (PLAIN | BOUND)[name]
    look_at(), look_at(Causal())  # whose tables are kept
    look = look_at(**options)
    given = {"mask": Everything(), "bias": HIDING * 0, "offset": 0} | options
    mask, bias, offset = given["mask"], given["bias"], given["offset"]
    assert (look.visibility is look_at(**options).visibility) == (name in PLAIN)
    for b in range(B):
        own_offset = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        table = mask.table(T, T, own_offset).expand(B, H, T, T)[b, 0] & (bias[0, 0] > -1e8)
        rows = table.tolist()
        counts = [any(row) for row in rows]
        if look.own:
            sees_own = [i + own_offset < T and row[i + own_offset] for i, row in enumerate(rows)]
            counts = [count and (sees or not any(sees_own)) for count, sees in zip(counts, sees_own, strict=True)]
        assert look.is_counted[b, 0].tolist() == counts
        first = counts.index(True)
        assert look.first_token_indices[b] == rows[first].index(True)
        padding = {i + own_offset for i, count in enumerate(counts) if not count} if look.own else set()
        real = [j not in padding for j in range(T)] if look.own else rows[first]
        assert look.is_real_key[b, 0].tolist() == real


def test_what_is_kept_of_a_map_in_inference_mode_serves_later_ones():
    share_visibility.cache_clear()
    with torch.inference_mode():
        expected = estimate_heads(look_at(Causal()), HeadOptions())
    look = look_at(Causal())
    for ours, theirs in zip(estimate_heads(look, HeadOptions()), expected, strict=True):
        assert {name: str(x.to_dict()) for name, x in ours.items()} == {name: str(x.to_dict()) for name, x in theirs.items()}
    assert detectors.entropy(look).isfinite().all()
