import json
import math

import pytest

from regard.train import Report

KNOWN = {"step": 3, "rate": 0.0, "gradient_norm": 1.5, "tokens": 33, "seconds": 0.25, "batch": 0}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_line_is_json_that_anyone_reads_whatever_the_loss(loss):
    row = Report(**KNOWN, loss_nats=loss, skipped=f"the loss is {loss}").to_row()
    assert json.loads(json.dumps(row, allow_nan=False)) == {**KNOWN, "skipped": f"the loss is {loss}"}


def test_what_is_not_known_is_not_said_and_a_nought_is():
    assert Report(**KNOWN, loss_nats=0.0).to_row() == {**KNOWN, "loss_nats": 0.0}
    looked = Report(**KNOWN, loss_nats=2.0, held_out_nats=1.0, best=True, sample="")
    assert looked.to_row() == {**KNOWN, "loss_nats": 2.0, "held_out_nats": 1.0, "best": True, "sample": ""}
