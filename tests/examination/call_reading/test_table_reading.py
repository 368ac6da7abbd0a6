"""Tables of relative positions: the row of each distance is read, and rows that no distance reads are named."""

import math

import pytest
import torch
from torch import nn

from examination.whole_models import Blocks
from examination.wrong_calls import C, D, H, Rotary
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


class Unscaled(Table):
    is_scaled = False


class Numbers(Table):
    columns = H

    def score(self, q, k, rows):
        return q @ k.mT / math.sqrt(D) + rows.permute(2, 0, 1)


class ByHead(Table):
    columns = C

    def score(self, q, k, rows):
        return (q @ k.mT + torch.einsum("bhqd,qkhd->bhqk", q, rows.unflatten(-1, (H, D)))) / math.sqrt(D)


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
WRONG = {
    "one less": (lambda x: x.clamp(1 - K, K - 1) + K, "clipped to -4 to 4, and no distance reads rows 0 and 10 of"),
    "past alone": (lambda x: x.clamp(-K, 0) + K, "clipped to -5 to 0, and no distance reads rows 6 to 10 of"),
    "future alone": (lambda x: x.clamp(0, K) + K, "clipped to 0 to 5, and no distance reads rows 0 to 4 of"),
    "absolute": (lambda x: x.abs().clamp_max(K), "clipped to -5 to 5, and no distance reads rows 6 to 10 of"),
    "half": (lambda x: x.clamp(-2, 2) + K, "clipped to -2 to 2, and no distance reads rows 0 to 2 and 8 to 10 of"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"), [*((Table, name) for name in WRONG), (Numbers, "one less"), (Unscaled, "half"), (ByHead, "half")]
)
def test_rows_that_no_distance_reads_are_named(make, name):
    torch.manual_seed(0)
    choose, evidence = WRONG[name]
    (finding,) = examine(make(choose), expects=Everything()).findings
    assert finding.kind == "wrong positions"
    assert finding.evidence == f"in the layer distances are {evidence} table.weight"


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


@pytest.mark.parametrize("name", ["relative_keys", "rel_emb", "relative_position_table", "rel_pos_k"])
def test_a_table_of_which_all_distances_read_one_row_is_named(name):
    """Scores of a query with the same vector for every key change no weight."""
    torch.manual_seed(0)
    layer = CausalTable(lambda x: x.clamp(0, K) + K)
    layer.add_module(name, layer.table)
    del layer.table
    object.__setattr__(layer, "table", getattr(layer, name))
    findings = examine(layer).findings
    assert [one.kind for one in findings] == ["wrong positions"]
    assert f"there is {name}.weight" in findings[0].evidence or name in findings[0].evidence
