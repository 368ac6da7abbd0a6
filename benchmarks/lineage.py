"""One sentence of so many tokens, read and translated into as many, by the three translators of the lineage, each of two
million parameters; they compute three different functions, so what is proven of each is that all of its own ways agree.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from recipes.lineage.runs import HERE, MODELS, VOCABULARY
from torch import Tensor

from benchmarks.tables import Table
from benchmarks.timing import measure_peak_megabytes, time_contenders
from regard.models.translator import KINDS, Translator
from regard.train.config import read_table

FIRST = 6  # tokens of a first sentence: more than those few for which products take another way
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
END, TOLERANCE = 0, 1e-4
TITLE = "A sentence read and translated into as many tokens, one at a time, float32, milliseconds"
COLUMNS = [
    "tokens",
    *(f"{way}: {name}" for way in ("read", "write") for name in MODELS),
    *(f"MiB: {name}" for name in MODELS),
]


def run(peak: dict[torch.dtype, float]) -> Table:
    """A row for each length."""
    table, models = Table(TITLE, COLUMNS), {name: make_model(name) for name in MODELS}
    with torch.inference_mode():
        for length in LENGTHS:
            source = sentence(length)
            for model in models.values():
                prove(model, source)
            ways: dict[str, Callable[[], Tensor]] = {}
            for name, model in models.items():
                state = start_decoding(model, source)
                ways |= {f"read {name}": partial(reading, model, source), f"write {name}": partial(write, model, state, length)}
            (name, first), *others = ways.items()
            found = time_contenders({name: first}, 0, beside=dict(others)).medians
            milliseconds = [found[f"{way} {name}"] for way in ("read", "write") for name in MODELS]
            table.add(length, *milliseconds, *(in_a_fresh_process(name, length) for name in MODELS))
    return table


def make_model(name: str) -> Translator:
    """A model of the sizes that the recipe trains; its weights are random, which costs the same."""
    torch.manual_seed(0)
    sizes = read_table(HERE / f"{name}.toml")["model"]
    return KINDS[sizes.pop("kind")](vocabulary=VOCABULARY["multi30k"], **sizes).eval()


def sentence(length: int) -> Tensor:
    """Random tokens (1, t)."""
    return torch.randint(1, VOCABULARY["multi30k"], (1, length), generator=torch.Generator().manual_seed(length))


def start_decoding(model: Translator, source: Tensor) -> object:
    """The state before a token is written."""
    return model.begin(model.encode(source, [source.shape[1]]))


def reading(model: Translator, source: Tensor) -> Tensor:
    """What the model makes of a sentence; something of it, for the clock."""
    start_decoding(model, source)
    return source


def write(model: Translator, state: object, length: int, keep: list[Tensor] | None = None) -> Tensor:
    """The likeliest token each time, so many of them, (1, t); the logits (1, n) they were chosen by, where they are kept."""
    tokens = [torch.tensor([END])]
    for _ in range(length):
        logits, state = model.read(tokens[-1], state)
        tokens.append(logits.argmax(-1))
        if keep is not None:
            keep.append(logits)
    return torch.stack(tokens[1:], 1)


def prove(model: Translator, source: Tensor) -> None:
    """AssertionError unless token by token, all at once, and with another sentence beside it the logits are the same."""
    length, kept = source.shape[1], list[Tensor]()
    tokens = write(model, start_decoding(model, source), length, kept)
    logits = torch.stack(kept, 1)
    targets = torch.cat((torch.tensor([[END]]), tokens[:, :-1]), 1)
    short = max(length // 2, 1)  # the other has this many tokens, the rest of it is padding
    both = torch.cat((source.flip(1), source))
    for found in (model(source, [length], targets), model(both, [short, length], targets.expand(2, -1))[1:]):
        difference = float((found - logits).abs().max())
        assert difference <= TOLERANCE, f"{type(model).__name__} differs from itself by {difference:.1e} at {length} tokens"


def in_a_fresh_process(name: str, length: int) -> float | None:
    """The peak megabytes of a sentence, above the model."""
    command = [sys.executable, "-m", "benchmarks.lineage", name, str(length)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1]) if ran.stdout.strip() else None


def print_peak(name: str, length: int) -> None:
    """What the fresh process prints."""
    model, source = make_model(name), sentence(length)
    with torch.inference_mode():
        write(model, start_decoding(model, sentence(FIRST)), FIRST)  # what is set up at a first call
        print(measure_peak_megabytes(lambda: write(model, start_decoding(model, source), length)) or "")


if __name__ == "__main__":
    print_peak(sys.argv[1], int(sys.argv[2]))
