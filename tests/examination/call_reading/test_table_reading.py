"""Tables of relative positions: the row of each distance is read, and rows that no distance reads are named."""

import math

import pytest
import torch
from torch import nn

from examination.whole_models import Blocks
from examination.wrong_calls import D, Rotary
from regard import Causal, Everything, examine

K = 5


class Table(Rotary):
    """Attention by hand with a row of a table for each distance j - i: a vector for queries, or a number for each head."""

    is_causal, is_scaled, columns = False, True, D

    def __init__(self, choose, count=2 * K + 1):
        super().__init__()
        self.choose = choose
        self.table = nn.Embedding(count, self.columns)

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        rows = self.table(self.choose(place - place[:, None]))  # (t, t, c)
        scores = self.score(q, k, rows)
        if self.is_causal:
            scores = scores.masked_fill(place > place[:, None], -torch.inf)
        return scores.softmax(-1) @ v

    def score(self, q, k, rows):
        relative = torch.einsum("bhqd,qkd->bhqk", q, rows)
        return (q @ k.mT + relative) / math.sqrt(D) if self.is_scaled else q @ k.mT / math.sqrt(D) + relative


class CausalTable(Table):
    is_causal = True


def clip(x):
    return x.clamp(-K, K) + K


RIGHT = {
    "clipped to the table": (clip, 2 * K + 1),
    "the other way round": (lambda x: clip(-x), 2 * K + 1),
    "both directions alike": (lambda x: x.abs().clamp_max(K), K + 1),
    "a row for each distance": (lambda x: x + 511, 1023),
    "rows for more distances": (lambda x: x.clamp(-400, 400) + 400, 801),
    "rows in another order": (lambda x: torch.arange(11).roll(3)[clip(x)], 2 * K + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_tables_are_not_accused(name):
    choose, count = RIGHT[name]
    for make in (Table, CausalTable):
        torch.manual_seed(0)
        report = examine(make(choose, count), expects=Causal() if make.is_causal else Everything())
        assert not report.findings
        assert not [one for one in report.unknown if "no distance" in one.what]


def test_rows_are_read_in_whole_models():
    torch.manual_seed(0)
    findings = examine(Blocks(lambda: CausalTable(lambda x: x.clamp(-2, 2) + K))).findings
    assert [one.evidence for one in findings] == [
        f"in blocks.{n}.attention distances are clipped to -2 to 0, and no distance reads rows 0 to 2 of "
        f"blocks.{n}.attention.table.weight"
        for n in range(len(findings))
    ]
    assert findings
