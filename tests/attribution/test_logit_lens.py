"""LogitLens: the largest entries of its logits, and what it prints."""

import pytest
import torch

from regard.attribution.logit_lens import LogitLens
from regard.errors import ConfigError

B, H, N, WORDS = 2, 3, 2, 7


def make_lens(**changes):
    logits = torch.randn(B, H, N, WORDS, generator=torch.Generator().manual_seed(0))
    return LogitLens(**{"layer": 4, "queries": (5, 9), "logits": logits} | changes)


def test_the_top_tokens_are_those_of_a_sort():
    lens = make_lens()
    values, tokens = lens.top(3)
    expected = lens.logits.sort(-1, descending=True)
    assert torch.equal(values, expected.values[..., :3])
    assert torch.equal(tokens, expected.indices[..., :3])
    assert torch.equal(lens.top(WORDS)[0].sort(-1).values, lens.logits.sort(-1).values)


@pytest.mark.parametrize("n", [0, WORDS + 1, 1.5, True])
def test_more_tokens_than_there_are_or_none_are_refused(n):
    with pytest.raises(ConfigError, match="n must be"):
        make_lens().top(n)


def test_a_line_has_the_head_the_query_and_the_tokens_of_the_first_row():
    lens = make_lens(words=lambda ids: [f"word{one}" for one in ids])
    lines = str(lens).split("\n")
    assert len(lines) == 1 + H * N
    for number, line in enumerate(lines[1:]):
        head, place = divmod(number, N)
        assert line.split()[:2] == [f"4.{head}", str(lens.queries[place])]
        token = int(lens.logits[0, head, place].argmax())
        assert f"{float(lens.logits[0, head, place, token]):+.2f} word{token}" in line
