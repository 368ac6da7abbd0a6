"""On a GPU: what recording costs, GPT-2's shape with random weights, every head of every layer looked at."""

from functools import partial

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from benchmarks.recording import LAYERS, check_overviews, eagerly, record_overviews, run_plainly, run_recorded, tokens
from benchmarks.tables import Table
from benchmarks.timing import time_contenders

LENGTHS, EAGER_UP_TO = (512, 2048, 8192), 2048
TITLE = "GPT-2's shape on a GPU: forward inside record, and with the overview of all 144 heads"
COLUMNS = [
    "dtype",
    "T",
    "plain ms",
    "record",
    "record + overview",
    "an overview of a layer ms",
    "eager, which keeps all weights",
]


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the plain forward, and the others as ratios to it."""
    table = Table(TITLE, COLUMNS)
    check_overviews("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = GPT2Model(GPT2Config(n_positions=max(LENGTHS))).eval().to("cuda", dtype)
        for t in LENGTHS:
            ids = tokens(t).cuda()
            contenders = {"plain": partial(run_plainly, model, ids), "record": partial(run_recorded, model, ids)}
            beside = {"seen": partial(record_overviews, model, ids)}
            found = time_contenders(contenders, 0, beside=beside, within=2.0).medians
            eager = time_eager(model, ids) if t <= EAGER_UP_TO else None
            plain = found["plain"]
            ratios = found["record"] / plain, found["seen"] / plain
            layer = (found["seen"] - found["record"]) / LAYERS
            table.add(str(dtype)[6:], t, plain, *ratios, layer, None if eager is None else eager / plain)
    return table


def time_eager(model: GPT2Model, ids: Tensor) -> float:
    """Milliseconds of the forward by eager attention, which hands out every weight."""
    found = time_contenders({"eager": partial(eagerly, model, ids)}, 0, within=1.0).medians["eager"]
    model.set_attn_implementation("sdpa")
    return found
