"""Keys in pages, as vLLM stores them: the map of each sequence is that of its keys in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import Causal, OutOfRangeError, ShapeError, Window
from regard.map.paged import load_paged_maps

SIZE, H, G, D, X = 3, 6, 2, 4, 2  # tokens of a page; heads; widths
Lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 11)), min_size=1, max_size=4)  # queries, keys before them


def build_cache(lengths, seed):
    """Sequences of keys, and the pages that hold them in any order, with numbers in all other slots."""
    torch.manual_seed(seed)
    keys = [torch.randn(n, G, D, dtype=torch.float64) for n in lengths]
    counts = [-(-n // SIZE) for n in lengths]
    free = torch.randperm(sum(counts) + 2)
    pages = torch.randn(len(free), SIZE, G, D, dtype=torch.float64)
    tables, taken = torch.full((len(lengths), max(counts) + 1), 10**6), 0  # unused entries are never read
    for row, (k, count) in enumerate(zip(keys, counts, strict=True)):
        tables[row, :count] = free[taken : taken + count]
        padded = torch.cat([k, torch.full((count * SIZE - len(k), G, D), torch.nan, dtype=torch.float64)])
        pages[tables[row, :count]] = padded.view(count, SIZE, G, D)
        taken += count
    return keys, pages, tables.int()


def softmax(q, k, window=None, scale=None):
    """The weights of queries that are the last tokens of a sequence, (h, q, k)."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(H // G, 1)) * (D**-0.5 if scale is None else scale)
    rows, columns = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    seen = (columns <= rows) & (columns > rows - (window or len(k)))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


FORMS = {
    "NHD": lambda pages: (pages, "NHD"),
    "HND": lambda pages: (pages.transpose(1, 2).contiguous(), "HND"),
    "the older one": lambda pages: (pages.unflatten(3, (D // X, X)).permute(0, 2, 3, 1, 4).contiguous(), "NHD"),
}


@pytest.mark.parametrize("form", FORMS)
@given(lengths=Lengths, seed=st.integers(0, 99))
def test_each_sequence_has_the_weights_of_its_own_keys(form, lengths, seed):
    keys, pages, tables = build_cache([q + before for q, before in lengths], seed)
    queries = [torch.randn(q, H, D, dtype=torch.float64) for q, _ in lengths]
    starts = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0)
    pages, layout = FORMS[form](pages)
    maps = load_paged_maps(torch.cat(queries), pages, tables, torch.tensor([len(k) for k in keys]), starts, layout=layout)
    for m, q, k in zip(maps, queries, keys, strict=True):
        torch.testing.assert_close(m.dense()[0], softmax(q, k), rtol=0, atol=1e-12)


def test_a_step_of_decoding_has_one_query_for_each_sequence_and_takes_a_window_and_a_scale():
    keys, pages, tables = build_cache([7, 2, 13], 3)
    q = torch.randn(3, H, D, dtype=torch.float64)
    maps = load_paged_maps(q, pages, tables, torch.tensor([7, 2, 13]), mask=Causal() & Window(3), scale=0.3)
    for m, one, k in zip(maps, q, keys, strict=True):
        torch.testing.assert_close(m.dense()[0], softmax(one[None], k, window=4, scale=0.3), rtol=0, atol=1e-12)


def test_arguments_that_do_not_fit_are_refused():
    _, pages, tables = build_cache([7, 2], 3)
    q, lengths = torch.randn(2, H, D, dtype=torch.float64), torch.tensor([7, 2])
    with pytest.raises(ShapeError, match="sequence 0 has 1 queries and 700 keys"):
        load_paged_maps(q, pages, tables, torch.tensor([700, 2]))
    with pytest.raises(OutOfRangeError, match="the blocks of sequence 1 must be from 0 to"):
        load_paged_maps(q, pages, tables, torch.tensor([7, 2 + SIZE]))
    with pytest.raises(ShapeError, match="q must be"):
        load_paged_maps(q[..., :2], pages, tables, lengths)
    with pytest.raises(ShapeError, match="of the same n"):
        load_paged_maps(q, pages, tables[:1], lengths)
    with pytest.raises(ShapeError, match="sequence 1 has 3 queries and 2 keys"):
        load_paged_maps(torch.randn(4, H, D, dtype=torch.float64), pages, tables, lengths, torch.tensor([0, 1, 4]))
