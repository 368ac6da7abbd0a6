"""The runs: which model, on which pairs, with which seed; each has a folder, and one that is done is left as it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.cli import main as regard
from regard.errors import DataError
from regard.text.pairs import PairReader, Pairs, prepare
from regard.text.pairs.sources import read_pairs
from regard.train.config import read_table
from regard.train.listeners import json_lines

HERE = Path(__file__).parent
MODELS = ("transformer", "additive", "plain")
SEEDS = (0, 1, 2)
SHORT = 20  # words of a side, at most, where only short sentences are trained on
SOURCES = {"multi30k": ("multi30k",), "joined": ("multi30k", "tatoeba/fra-eng.zip")}
VOCABULARY = {"multi30k": 4000, "joined": 8000}


@dataclass(frozen=True)
class Run:
    """A run, by what is special about it."""

    model: str
    pairs: str = "multi30k"
    seed: int = 0
    most_words: int = 0

    @property
    def name(self) -> str:
        """As --only takes it."""
        words = f"-upto{self.most_words}" if self.most_words else ""
        return f"{self.pairs}-{self.model}{words}-{self.seed}"


def runs() -> Iterator[Run]:
    """Multi30k with three seeds each; then for BLEU against length both sets together, whole and short sentences only."""
    for seed in SEEDS:
        yield from (Run(model, seed=seed) for model in MODELS)
    for most_words in (0, SHORT):
        yield from (Run(model, "joined", most_words=most_words) for model in MODELS)


def prepared(name: str, data: Path, root: Path, most: int) -> Path:
    """The folder of prepared pairs; `most` keeps so many pairs of each part, for a trial of the whole recipe."""
    folder = root / (f"{name}-{most}" if most else name)
    if not (folder / "pairs.json").is_file():
        sources = [data / source for source in SOURCES[name]]
        if most:
            sources = [excerpt(source, root / f"{name}-files-{most}", most) for source in sources]
        print(prepare(sources, folder, vocabulary=VOCABULARY[name] // (8 if most else 1)), flush=True)
    return folder


def excerpt(source: Path, root: Path, most: int) -> Path:
    """The first pairs of a source, as files of their own."""
    folder = root / source.name
    folder.mkdir(parents=True, exist_ok=True)
    found = list(read_pairs(source, ("en", "fr")))
    if found[0].part is None:
        path = folder / "some.tsv"
        path.write_text("".join(f"{one.source}\t{one.target}\n" for one in found[:: max(len(found) // most, 1)]))
        return path
    for part in ("train", "valid", "test"):
        some = [one for one in found if one.part == part][:most]
        for side, ending in (("source", "en"), ("target", "fr")):
            (folder / f"{part}.{ending}").write_text("".join(f"{getattr(one, side)}\n" for one in some))
    return folder


def train(run: Run, corpus: Path, root: Path, trial: bool) -> None:
    """Trains a run, or goes on with it, by `regard translate --train`; steps are as many epochs as on Multi30k alone."""
    config, out = read_table(HERE / f"{run.model}.toml"), root / run.name
    pairs = Pairs.load(corpus)
    part = pairs.train.limit_words(run.most_words) if run.most_words else pairs.train
    epoch = PairReader(part, config["batch_tokens"]).batches
    flags = ["--corpus", str(corpus), "--out", str(out), "--seed", str(run.seed), "--most-words", str(run.most_words)]
    if run.pairs == "joined":
        flags += ["--evaluate-every", str(max(epoch // 2, 1))]  # as many steps as on Multi30k: seven times the pairs
    if trial:
        flags += ["--steps", "6", "--evaluate-every", "3", "--width", "32", "--warmup", "2"]
    print(f"\n{run.name}: {epoch} batches an epoch", flush=True)
    if regard(["translate", "--train", "--config", str(HERE / f"{run.model}.toml"), *flags]):
        raise SystemExit("the training was stopped; the same command goes on")


def seconds(run: Run, root: Path) -> float:
    """How long a run's steps took, together."""
    return sum(float(row["seconds"]) for row in json_lines.read_rows(root / run.name / json_lines.LOG_NAME))


def done(run: Run, root: Path) -> bool:
    """Whether a run has a model and all of its steps."""
    try:
        steps = json_lines.read_rows(root / run.name / json_lines.LOG_NAME)[-1]["step"]
    except (DataError, IndexError):
        return False
    return bool(steps >= read_table(HERE / f"{run.model}.toml")["steps"])
