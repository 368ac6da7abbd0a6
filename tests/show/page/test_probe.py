"""The probe of the page is regard.probe_heads on the model that read the text."""

import pytest
import torch

import regard
from regard import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe.classification.head_kinds import TELLING_KINDS
from show.page.server_client import open_client


@pytest.mark.slow
def test_the_probe_is_that_of_the_library_and_is_run_once():
    model = GPT2.load("pocket", torch.float64)
    with open_client(GPT2Adapter("pocket", model), text="Once upon a time") as client:
        *rows, last = client.lines("/api/r/r1/probe")
        assert client.lines("/api/r/r1/probe") == [*rows, last]
    table = regard.probe_heads(model)
    assert last == {"detectors": list(table.detectors), "notes": list(table.notes), "telling": list(TELLING_KINDS)}
    assert [line["row"]["kind"] for line in rows] == [row.kind for row in table]
    assert [line["row"]["sentence"] for line in rows] == [row.sentence for row in table]
    assert [(line["done"], line["of"]) for line in rows] == [(n + 1, len(table)) for n in range(len(table))]
