"""What recordings keep lies in memory that is taken again when nobody holds it, and not before."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.observe import pool
from regard.observe.pool import FREE, LENT, copied, waiting

PAGE = 4096


@pytest.fixture(autouse=True)
def empty():
    FREE.clear()
    before = set(LENT)
    yield
    FREE.clear()
    assert set(LENT) == before


@given(st.lists(st.integers(1, 9), max_size=4), st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.complex64]))
def test_a_copy_is_the_same_contiguous_and_apart(shape, dtype):
    x = torch.randint(0, 2, shape).to(dtype)
    for source in (x, x.mT if x.dim() > 1 else x, x.expand(3, *shape)):
        copy = copied(source)
        assert copy.equal(source)
        assert copy.is_contiguous()
        assert copy.dtype == dtype
        source.view(torch.uint8).zero_() if source is x and x.dim() else None
        del copy
    assert copied(torch.empty(0, 3)).shape == (0, 3)


def test_memory_is_taken_again_when_its_last_view_is_gone():
    copy = copied(torch.ones(3 * PAGE))
    place, part = copy.data_ptr(), copy.view(3, -1)[1, 5:]
    del copy
    other = copied(torch.zeros(3 * PAGE))
    assert other.data_ptr() != place
    assert part.sum() == part.numel()
    del part
    assert waiting() == 3 * PAGE * 4
    assert copied(torch.zeros(3 * PAGE)).data_ptr() == place


def test_no_more_waits_than_the_limit_and_what_came_back_longest_ago_goes_first(monkeypatch):
    monkeypatch.setattr(pool, "LIMIT", 8 * PAGE)
    old = [copied(torch.ones(PAGE, dtype=torch.uint8)) for _ in range(5)]
    new = [copied(torch.ones(2 * PAGE, dtype=torch.uint8)) for _ in range(3)]
    new.clear()
    assert waiting() == 6 * PAGE
    old.clear()
    assert {size: len(blocks) for size, blocks in FREE.items()} == {2 * PAGE: 1, PAGE: 5}
    new.extend(copied(torch.ones(2 * PAGE, dtype=torch.uint8)) for _ in range(3))
    new.pop()
    new.clear()
    assert {size: len(blocks) for size, blocks in FREE.items()} == {PAGE: 2, 2 * PAGE: 3}
    huge = copied(torch.ones(9 * PAGE, dtype=torch.uint8))
    del huge
    assert waiting() <= 8 * PAGE


def test_threads_never_share_a_block():
    def work(number: int) -> None:
        for turn in range(200):
            kept = [copied(torch.full((PAGE,), number * 1000 + turn + i)) for i in range(3)]
            wrong.extend(i for i, x in enumerate(kept) if not (x == number * 1000 + turn + i).all())

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
