"""The table: BLEU and chrF of each run, by greedy choice and by four beams, and against the length of the sentence."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.lineage.runs import Run, seconds
from regard.atomic_write import write_atomically
from regard.evaluate.translation_scores import TranslationScore, bleu, chrf, translate_sentences
from regard.models import translator
from regard.text.pairs import Pairs

BEAMS = (1, 4)
DRAWS = 1000  # of sentences, for the intervals
EDGES = (0, 5, 8, 11, 14, 17, 20, 25, 30, 1000)  # words of a source: more than the first, at most the second
LEAST = 10  # sentences of a bin


def evaluated(run: Run, pairs: Path, root: Path) -> dict[str, Any]:
    """What is measured of a run, kept in its folder as table.json."""
    path = root / run.name / "table.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    test, model = Pairs.load(pairs).test, translator.load(root / run.name / "model")
    sources, references = test.decode_sentences("source"), test.decode_sentences("target")
    row: dict[str, Any] = {"run": run.name, "model": run.model, "pairs": run.pairs, "seed": run.seed}
    row |= {"most_words": run.most_words, "training_seconds": seconds(run, root), "sentences": len(test)}
    row["parameters"] = sum(one.numel() for one in model.parameters())
    for beams in BEAMS:
        began = time.perf_counter()
        translated = list(translate_sentences(model, sources, beams=beams))
        row |= {f"seconds_{beams}": time.perf_counter() - began, f"translations_{beams}": translated}
        scores = [score(translated, references, DRAWS) for score in (bleu, chrf)]
        row |= {f"{one.name}_{beams}": said(one) for one in scores}
        row[f"lengths_{beams}"] = by_length(sources, translated, references)
    with write_atomically(path) as (beside,):
        beside.write_text(json.dumps(row, ensure_ascii=False, indent=1), encoding="utf-8")
    return row


def said(score: TranslationScore) -> dict[str, Any]:
    """A score as JSON."""
    return {"score": score.score, "interval": score.interval, "signature": score.signature}


def by_length(sources: Sequence[str], translated: Sequence[str], references: Sequence[str]) -> list[dict[str, Any]]:
    """BLEU of the sentences of each bin of lengths, with their number and the interval."""
    words = [len(one.split()) for one in sources]
    found = []
    for above, upto in pairwise(EDGES):
        here = [n for n, count in enumerate(words) if above < count <= upto]
        if len(here) >= LEAST:
            score = bleu([translated[n] for n in here], [references[n] for n in here], DRAWS)
            found.append({"above": above, "upto": upto, "sentences": len(here), **said(score)})
    return found


def write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """table.json and table.md of all rows."""
    kept = [numbers(row) for row in rows]
    with write_atomically(folder / "table.json", folder / "table.md") as (table, words):
        table.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        words.write_text(markdown(kept), encoding="utf-8")
    print(f"\n{markdown(kept)}\n{folder / 'table.json'}", flush=True)


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the translations."""
    return {name: value for name, value in row.items() if not name.startswith("translations")}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as lines of a document."""
    lines = ["| run | parameters | training | BLEU, greedy | BLEU, 4 beams | chrF, 4 beams |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["run"], f"{row['parameters']:,}", f"{row['training_seconds']:,.0f} s"]
        cells += [within(row[name]) for name in ("BLEU_1", "BLEU_4", "chrF_4")]
        lines.append(f"| {' | '.join(cells)} |")
    signed = sorted({row[name]["signature"] for row in rows for name in ("BLEU_4", "chrF_4")})
    lines += ["", *(f"`{one}`" for one in signed)]
    lines += ["", "| run, 4 beams | " + " | ".join(bins()) + " |", "|---" * (len(EDGES)) + "|"]
    for row in rows:
        cells = {one["above"]: f"{within(one)} of {one['sentences']}" for one in row["lengths_4"]}
        lines.append(f"| {row['run']} | " + " | ".join(cells.get(above, "") for above in EDGES[:-1]) + " |")
    return "\n".join(lines) + "\n"


def bins() -> list[str]:
    """The bins of lengths in words."""
    return [f"{above + 1} to {upto}" for above, upto in pairwise(EDGES[:-1])] + [f"over {EDGES[-2]}"]


def within(score: dict[str, Any]) -> str:
    """A score and its interval."""
    return f"{score['score']:.1f}" + ("" if score["interval"] is None else f" ± {score['interval']:.1f}")
