"""The kind of each head of a recording, computed head by head."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from regard.observe.classification.head_classification import classify_heads, describe_wordless_keys
from regard.observe.classification.head_kinds import RULES, TELLING_KINDS
from regard.observe.classification.head_scores import HeadOptions, define_user_scores
from regard.observe.head_table import Head
from regard.show.page.head_pictures import Alive
from regard.show.page.recording_entry import HeadPlace, RecordingEntry
from regard.show.page.select_head import select_head

MAX_LAYER_WEIGHTS = 2**22  # weights of a head, over which the heads of a layer are processed one by one


def stream_head_table(entry: RecordingEntry, place: HeadPlace, alive: Alive) -> Iterator[dict[str, Any]]:
    """Generate a line per head with the score of every detector and the progress; then the detectors and notes.

    The result is stored with the recording, so that later requests have it at once.
    """
    attention = entry.get_layers(place)
    key = attention.kind, attention.part
    total = sum(shape[1] for shape in attention.shapes)
    rows: list[Head] = []
    has_words = entry.find_word_list(attention, 1) is not None  # a tower that reads images has other tokens than the text
    wanted = HeadOptions(entry.recording.tokens if has_words else None, scores=entry.scores)
    known = entry.head_rows.get(key)
    for row in known[0] if known else compute_rows(entry, place, wanted, alive):
        rows.append(row)
        yield {"done": len(rows), "of": total, "row": convert_row(row)}
    own = [f"{name}: {text.splitlines()[0]}" for name, text in define_user_scores(entry.scores).items()]
    wordless = describe_wordless_keys(entry.recording, attention.kind, attention.part)
    notes = known[1] if known else [*wanted.describe_missing_scores(attention.kind, wordless), *own]
    entry.head_rows[key] = rows, notes
    yield describe_table(rows[0].scores if rows else (), notes)


def describe_table(detectors: Iterable[str], notes: Iterable[str]) -> dict[str, Any]:
    """Describe a table in JSON: its detectors, its notes, and the kinds whose heads the page names first, in this order."""
    return {"detectors": list(detectors), "notes": list(notes), "telling": list(TELLING_KINDS)}


def compute_rows(entry: RecordingEntry, place: HeadPlace, wanted: HeadOptions, alive: Alive) -> Iterator[Head]:
    """Generate the rows of regard.heads, a layer at a time, or a head at a time where heads are large."""
    attention = entry.get_layers(place)
    for number, (b, h, q, k) in enumerate(attention.shapes):
        kind, part = attention.kind, attention.part
        single_heads = (select_head(entry.recording, kind, part, number, head) for head in range(h))
        for recording in single_heads if b * q * k > MAX_LAYER_WEIGHTS else (entry.recording,):
            alive()
            yield from classify_heads(recording, wanted, kind=kind, part=part, layers=[number])


def convert_row(row: Head) -> dict[str, Any]:
    """Convert a row to JSON."""
    scores = {name: score if math.isfinite(score) else None for name, score in row.scores.items()}
    plain = {name: getattr(row, name) for name in ("layer", "name", "head", "kind", "sentence")}
    deciding = row.scores.get(RULES.get(row.kind, row.kind))
    return {**plain, "scores": scores, "verdict": None if deciding is None else deciding.to_dict()}
