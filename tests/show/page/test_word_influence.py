import torch

import regard
from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.show.page.session import GenerationRequest, Session


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
