import torch

import regard
from regard import GPT2, Window
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.session import GenerationRequest, Session
from regard.show.page.word_influence import average_last_rows
from show.page.server_client import rows_and_keys


def test_a_story_is_told_again_as_it_was_written_and_has_the_gradients_of_what_was_read():
    session = Session(None, GPT2Adapter("pocket", GPT2.load("pocket", torch.float64)))
    *lines, last = session.generate_text(GenerationRequest("Once upon", 7, 0.9, 3), lambda: None)
    summary = last["recording"]
    assert summary["request"] == {"text": "Once upon", "tokens": 7, "temperature": 0.9, "seed": 3}
    lines = [{**line, "looked": looked} for line, looked in zip(lines, last["looked"], strict=True)]
    assert session.get_story(summary["id"])["lines"] == lines
    entry = session.get_entry(summary["id"])
    for line in (lines[0], lines[-1]):
        at, token = line["place"] - 1, line["token"]
        row = session.get_influence(entry, "weight", at, token, lambda: None)["numbers"]
        for one in line["looked"]:
            assert abs(row[one["place"]] - one["weight"]) < 1e-12
        assert row[line["place"] :] == [None] * (len(row) - line["place"])
        model = session.adapter.model
        with regard.record(model, keep="values") as whole:
            logits = model(entry.ids)
        found = whole.attribute(logits[0, at, token])
        for kind in ("pull", "cut"):
            sums = sum(found.map(layer, kind=kind).column_sums()[0].sum(0) for layer in range(6))
            shown = session.get_influence(entry, kind, at, token, lambda: None)
            torch.testing.assert_close(torch.tensor(shown["numbers"]).double(), sums, rtol=1e-5, atol=1e-9)
            assert all(name.count(".") == 1 for name in shown["heads"])


def test_words_that_a_window_has_left_behind_are_hidden_as_later_ones_are():
    q, k = torch.randn(2, 1, 3, 11, 5, generator=torch.Generator().manual_seed(0))
    entry = RecordingEntry("r1", rows_and_keys(q, k, Window(3, 0)))
    for norms in (None, [torch.ones(1, 3, 11, 1)]):
        row = average_last_rows(entry, 7, norms)
        assert torch.equal(row.isnan(), ~Window(3, 0).table(11, 11)[..., 7, :].flatten())
        expected = entry.recording.map(0)[0, :, 7].mean(0)
        assert torch.equal(row.nan_to_num(0), expected)
