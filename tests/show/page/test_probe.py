"""The probe of the page is regard.probe_heads on the model that read the text."""

import pytest
import torch

import regard
from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe.classification.head_kinds import TELLING_KINDS
from regard.show.page.session import Session
from show.page.server_client import make_sorter, open_client


@pytest.mark.slow
def test_the_probe_is_that_of_the_library_and_is_run_once():
    model = GPT2.load("pocket", torch.float64)
    with open_client(GPT2Adapter("pocket", model), text="Once upon a time") as client:
        lines = client.lines("/api/r/r1/probe")
        *rows, last = [line for line in lines if "progress" not in line]
        assert client.lines("/api/r/r1/probe") == [*rows, last]
        assert [line["share"] for line in lines if "progress" in line][: len(rows)] == pytest.approx(
            [(n + 1) / len(rows) for n in range(len(rows))]
        )
    table = regard.probe_heads(model)
    assert last == {"detectors": list(table.detectors), "notes": list(table.notes), "telling": list(TELLING_KINDS)}
    assert [line["row"]["kind"] for line in rows] == [row.kind for row in table]
    assert [line["row"]["sentence"] for line in rows] == [row.sentence for row in table]
    assert [(line["done"], line["of"]) for line in rows] == [(n + 1, len(table)) for n in range(len(table))]


def test_others_use_the_model_while_it_is_probed():
    session = Session(adapter=make_sorter())
    entry = session.get_entry(session.run_text("CBABBC", lambda: None)["id"])
    lines = session.stream_probe(entry, lambda: None)
    assert "progress" in next(lines)
    assert session.run_text("ABC", lambda: None)["id"] != entry.id
    assert "detectors" in [*lines][-1]
