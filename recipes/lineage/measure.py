"""What is measured of the runs that are done, each kept in runs/lineage/measured; all of it together in this folder.

results.json has numbers alone; alignments.json the words of five sentences and what was looked at. Runs may be made on
several machines: what was measured of one stays in both files where its folder is no longer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.lineage import alignments, lengths, probes, runs, table
from recipes.lineage.runs import HERE, Run
from regard.atomic_write import write_atomically
from regard.models import translator
from regard.models.recurrent import RecurrentTranslator
from regard.models.translator import Translator
from regard.text.pairs import Pairs

RESULTS, ALIGNMENTS = HERE / "results.json", HERE / "alignments.json"


@dataclass(frozen=True)
class Place:
    """A run, and the folder of all of them."""

    run: Run
    root: Path

    @property
    def model(self) -> Translator:
        """What was trained."""
        return translator.load(self.root / self.run.name / "model")

    @property
    def row(self) -> dict[str, Any]:
        """What was evaluated, with the translations of the test part."""
        return table.evaluated(self.run, Path(), self.root)


def natural(place: Place, captions: Pairs) -> Any:
    """BLEU by the length of a sentence, captions and others apart."""
    test, translated = Pairs.load(place.root / place.run.pairs).test, place.row[f"translations_{lengths.MOST}"]
    return lengths.natural(test, translated, captions.test.decode_sentences("source"))


def together(place: Place, captions: Pairs) -> Any:
    """BLEU of captions read together and apart."""
    return lengths.measured(place.model, captions.test.decode_sentences("source"), captions.test.decode_sentences("target"))


def probed(place: Place, captions: Pairs) -> Any:
    """What a probe reads of an encoder's last states; nothing of a model that has none."""
    model = place.model
    if not isinstance(model, RecurrentTranslator):
        return []
    return probes.measured(model, captions.train.decode_sentences("source"), captions.test.decode_sentences("source"))


def aligned(place: Place, captions: Pairs) -> Any:
    """What is looked at."""
    return alignments.measured(
        place.model, captions.valid.decode_sentences("source"), captions.valid.decode_sentences("target")
    )


MEASURES: dict[str, Callable[[Place, Pairs], Any]] = {
    "natural": natural,
    "together": together,
    "probe": probed,
    "alignment": aligned,
}


def measured(root: Path) -> None:
    """Measures what is not yet measured of the runs that are done, and writes both files; what they say of others stays."""
    done = [Place(one, root) for one in runs.runs() if (root / one.name / "table.json").is_file()]
    pairs = Pairs.load(root / "multi30k")  # whose sentences are captions, which all of the models have learned from
    numbers, seen = {row["run"]: row for row in read(RESULTS)}, read(ALIGNMENTS)
    for one in done:
        found = {name: kept(name, one, pairs) for name in MEASURES}
        seen[one.run.name] = found.pop("alignment")
        numbers[one.run.name] = table.numbers(one.row) | found
    order = [one.name for one in runs.runs() if one.name in numbers]
    with write_atomically(RESULTS, ALIGNMENTS) as (results, words):
        results.write_text(compact([numbers[name] for name in order]), encoding="utf-8")
        words.write_text(compact({name: seen[name] for name in order}), encoding="utf-8")
    print(f"{len(done)} runs measured, {len(order)} in {RESULTS.name} and {ALIGNMENTS.name}", flush=True)


def read(path: Path) -> Any:
    """What a file of JSON says."""
    return json.loads(path.read_text(encoding="utf-8"))


def kept(name: str, place: Place, captions: Pairs) -> Any:
    """A measure of a run, from its file where there is one."""
    path = place.root / "measured" / f"{place.run.name}-{name}.json"
    if not path.is_file():
        print(f"{place.run.name}: {name}", flush=True)
        found = MEASURES[name](place, captions)
        path.parent.mkdir(exist_ok=True)
        with write_atomically(path) as (beside,):
            beside.write_text(compact(found), encoding="utf-8")
    return read(path)


def compact(value: Any, depth: int = 0) -> str:
    """JSON with a line for each list of numbers and each record of them: one number less is one line that differs."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(one, dict | list) for one in inner) or (isinstance(value, dict) and depth > 1):
        return json.dumps(value, ensure_ascii=False)
    space, close = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {compact(one, depth + 1)}" for name, one in value.items()]
        return "{" + space + f",{space}".join(parts) + close + "}"
    return "[" + space + f",{space}".join(compact(one, depth + 1) for one in value) + close + "]"
