"""Every family of models that was tried: how far its recorded maps are from what the same model says with eager attention.

`python -m benchmarks.families` prints the table. Small configs of transformers with random weights in float32, sequences
padded on the right, on the left and not at all; 0 to 1 is the range of a weight. Families without a softmax are at the end:
their difference is that of the map times the values from the layer's own output, relative to the largest of a head.
"""

import sys
import warnings
from importlib import metadata
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.tables import Table
from observe.derived_families import DERIVED, compare_derived
from observe.eager_weights import compare_with_eager
from observe.eager_weights import run as recorded
from observe.families import FAMILIES, OTHERS
from observe.family import Family
from observe.handwritten_families import HAND, UNCOMPARED, UNSOFTENED, compare_with_attentions, compare_with_own_weights
from observe.handwritten_media_families import KERNELS
from observe.recurrent_models import RECURRENT, RecurrentFamily, draw_tokens
from observe.shared_rows import SHARED, compare_with_outputs
from observe.wrapped_models import compare_ranks, list_wrappers
from regard.observe import record

TITLE = "Families of models: largest difference of a recorded map from the same model's eager attention"
COLUMNS = ["family", "class", "runs", "padding", "maps", "by itself", "run eager"]
NOTES = {
    "wavlm": "recorded; it hands out the mean over heads, which is the mean of its maps",
    "t5gemma2": "recorded; self and cross attention are one row, whose halves it hands out. Steps of a generation stay apart",
    "diffllama": "recorded; two calls a layer, one for each half of the values, have one map",
}


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row a family; the largest difference over all layers and paddings, recorded as it runs by itself and run eager.

    Families whose config is derived from its defaults are named by their class.
    """
    table = Table(TITLE, COLUMNS)
    for family in FAMILIES:
        add_family(table, family)
    for family in OTHERS:
        table.add(family.name, family.model, "", "", "", NOTES[family.name], "")
    for family in HAND:
        measure_handwritten(table, family)
    for family in KERNELS:
        maps, difference = compare_with_own_weights(family, "none")
        table.add(family.name, family.model, "a kernel of torch", "none", maps, difference, "the formula of each kernel call")
    for name in DERIVED:
        maps, difference = compare_derived(name)
        table.add(name, name, "its defaults, made small", "none", maps, difference, "its own softmax, in float32")
    for one in SHARED:
        maps, difference = compare_with_outputs(one)
        table.add(one.family.name, one.family.model, "one row of weights", "none", maps, difference, "its own output")
    for recurrent in RECURRENT:
        add_recurrent(table, recurrent)
    add_wrappers(table)
    return table


def add_wrappers(table: Table) -> None:
    """Add one small model inside each wrapper, and small models on two ranks."""
    for one in list_wrappers():
        try:
            package = f"{one.package} {metadata.version(one.package)}"
            maps, difference = one.compare()
        except ImportError as error:
            table.add(one.name, one.package, "wrapped", "", "", f"not installed: {type(error).__name__}", "")
            continue
        table.add(one.name, package, "wrapped", "none", maps, difference, one.reference)
    for name, (maps, difference) in compare_ranks().items():
        package = f"torch {metadata.version('torch')}"
        table.add(name, package, "on two ranks", "none", maps, difference, "the model on one process, in float64")


def add_recurrent(table: Table, family: RecurrentFamily) -> None:
    """Add a family with layers without a softmax, run once without padding."""
    model, tokens = family.build(), draw_tokens(37)
    with torch.no_grad():
        outside = model(tokens)[0]
        with record(model) as recording:
            assert torch.equal(model(tokens)[0], outside), family.name
    assert not recording.missed, family.name
    maps = [recording.map(layer, kind="implicit") for layer in range(len(recording.layers("implicit")))]
    error = max(one.certificate().error for one in maps)
    table.add(family.name, type(model).__name__, "implicit", "", len(maps), error, "")


def add_family(table: Table, family: Family) -> None:
    found = [compare_with_eager(family, side) for side in family.sides]
    assert all(one.unchanged for one in found), family.name
    by_itself = max(one.difference for one in found)
    eager = "written out by hand" if family.apart and found[0].missed else max(one.eager for one in found)
    maps = sum(one.maps for one in found)
    table.add(family.name, family.model, found[0].implementation, ", ".join(family.sides), maps, by_itself, eager)


def measure_handwritten(table: Table, family: Family) -> None:
    """Add a family whose attention is written by hand, against the attentions that it returns, or its own softmaxes."""
    model = family.build()
    _, recording = recorded(model, family.feed(model), recorded=True)
    if recording.missed or family.name in UNSOFTENED:
        said = f"missed: {recording.missed[0].reason}" if recording.missed else UNCOMPARED[family.name]
        table.add(family.name, family.model, "by hand", "", len(recording.calls), said, "")
        return
    own = family.name in UNCOMPARED
    found = [(compare_with_own_weights if own else compare_with_attentions)(family, side) for side in family.sides]
    maps, difference = sum(n for n, _ in found), max(one for _, one in found)
    beside = f"its own softmax: {UNCOMPARED[family.name]}" if own else "written out by hand"
    table.add(family.name, family.model, "by hand", ", ".join(family.sides), maps, difference, beside)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(run({}).markdown())
