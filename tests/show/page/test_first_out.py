"""A recording without its first word has, in every answer, the softmax over the other words."""

import pytest
import torch

import regard
from regard import Causal, Window
from regard.map.codes import decode_weights
from regard.mechanism import Given, Prefix
from regard.observe.classification.head_classification import heads
from show.page.server_client import in_steps, open_client, record_sorter, rows_and_keys


def renormalize(weights: torch.Tensor) -> torch.Tensor:
    """The weights (..., q, k) divided by the share of the keys after the first."""
    rest = weights.clone().double()
    rest[..., 0] = 0
    share = rest.sum(-1, keepdim=True)
    return torch.where(share > 0, rest / share, 0.0)


@pytest.mark.parametrize("make", [record_sorter, in_steps], ids=["one forward", "a token at a time"])
def test_rows_columns_tiles_and_scores_leave_the_first_word_out(make):
    recording = make()
    with open_client(recording) as client:
        right = renormalize(recording.map(1)[0, 2])
        close = {"rtol": 4e-4, "atol": 1e-9}
        where = {"layer": 1, "head": 2}
        torch.testing.assert_close(decode_weights(client.codes("/api/r/r1:rest/row", q=7, **where)).double(), right[7], **close)
        column = decode_weights(client.codes("/api/r/r1:rest/column", k=3, **where)).double()
        torch.testing.assert_close(column, right[:, 3], **close)
        tile = decode_weights(client.codes("/api/r/r1:rest/tile", level=0, row=0, column=0, **where)).double()
        torch.testing.assert_close(tile, right, **close)
        cell = client.json("/api/r/r1:rest/cell", q=7, k=3, **where)
        assert cell["weight"] == pytest.approx(float(right[7, 3]), rel=1e-6)
        *rows, _ = client.lines("/api/r/r1:rest/heads")
        row = next(line["row"] for line in rows if (line["row"]["layer"], line["row"]["head"]) == (1, 2))
        previous = right.diagonal(-1)[1:].mean()  # the second query sees no other word than itself
        if make is record_sorter:
            assert row["scores"]["previous token"] == pytest.approx(float(previous), rel=1e-6)
        assert client.codes("/api/r/r1/row", q=7, **where)[0] != 0  # the recording itself stays


def test_a_mask_that_hides_the_first_key_gives_the_same_map():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 19, 5, dtype=torch.float64)
    with open_client(rows_and_keys(q, k)) as client:
        found = decode_weights(client.codes("/api/r/r1:rest/tile", level=0, row=0, column=0, head=1)).double()
    exact = regard.AttentionMap(q, k, Causal() & ~Prefix(1)).dense()[0, 1]
    torch.testing.assert_close(found, exact, rtol=4e-4, atol=1e-9)


PADDING = torch.tensor([0, 4])  # of each text


def record_padded(ends: list[int], form: str, window: int = 13) -> regard.Recording:
    """A recording of two texts of 13 words with padding on the left, whose mask is a table or a bias, in calls up to `ends`.

    A cache of a window keeps only the keys that some query of the next call sees.
    """
    torch.manual_seed(1)
    q, k = torch.randn(2, 2, 4, 13, 5, dtype=torch.float64)
    seen = (Causal().table(13, 13) & (torch.arange(13) >= PADDING.view(2, 1, 1, 1))).expand(2, 1, 13, 13)
    seen = seen & Window(left=window - 1).table(13, 13)

    class Layer(torch.nn.Module):
        def forward(self, start: int, stop: int) -> torch.Tensor:
            oldest = max(start - window + 1, 0)
            part, kept = seen[:, :, start:stop, oldest:stop], k[:, :, oldest:stop]
            bias = torch.zeros(part.shape, dtype=q.dtype).masked_fill(~part, torch.finfo(q.dtype).min)
            given = {"mask": Given(part)} if form == "table" else {"bias": bias}
            return regard.attention(q[:, :, start:stop], kept, kept, **given, offset=start - oldest)

    layer = Layer()
    with torch.inference_mode(), regard.record(layer) as recording:
        for start, stop in zip([0, *ends], ends, strict=False):
            layer(start, stop)
    return recording


CALLS = {
    "one forward": ([13], 13),
    "a token at a time": ([*range(5, 14)], 13),
    "a chunk of padding": ([3, 8, 13], 13),
    "a window whose cache begins at the first word": ([*range(6, 14)], 3),
    "a window and a chunk of padding": ([3, 6, 9, 11, 13], 3),
}


@pytest.mark.parametrize(("ends", "window"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("form", ["table", "bias"])
def test_after_padding_on_the_left_the_first_word_of_each_text_is_left_out(form, ends, window):
    recording = record_padded(ends, form, window)
    with open_client(recording) as client:
        for b, first in enumerate(PADDING.tolist()):
            whole = recording.map(0)[b, 2].double()
            whole[:, first] = 0
            right = (whole / whole.sum(-1, keepdim=True)).nan_to_num(0)[first:]
            tile = client.codes("/api/r/r1:rest/tile", level=0, row=0, column=0, b=b, head=2)
            torch.testing.assert_close(decode_weights(tile).double()[first:], right, rtol=4e-4, atol=1e-9)
            cell = client.json("/api/r/r1:rest/cell", q=8, k=7, b=b, head=2)
            assert cell["weight"] == pytest.approx(float(right[8 - first, 7]), rel=1e-6)
            assert not client.json("/api/r/r1:rest/cell", q=11, k=first, b=b, head=2)["visible"]


def test_the_heads_of_the_whole_recording_are_not_those_without_the_first_word():
    recording = record_sorter()
    with open_client(recording) as client:
        whole, rest = (client.lines(f"/api/r/{name}/heads")[:-1] for name in ("r1", "r1:rest"))
    assert [line["row"]["kind"] for line in whole] == [row.kind for row in heads(recording)]
    assert whole != rest
