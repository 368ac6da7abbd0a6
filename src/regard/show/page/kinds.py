"""The kind of each head of a recording, computed head by head."""

import math
from collections.abc import Iterator
from typing import Any

from regard.observe import heads
from regard.observe.heads import Head, Wanted
from regard.show.page.alone import alone
from regard.show.page.entry import Entry, Place
from regard.show.page.pictures import Alive

APART = 2**22  # weights of a head, over which the heads of a layer are processed one by one


def typing(entry: Entry, place: Place, alive: Alive) -> Iterator[dict[str, Any]]:
    """Generate a line per head with the score of every detector and the progress; then the detectors and notes.

    The result is stored with the recording, so that later requests have it at once.
    """
    attention = entry.attention(place)
    key = attention.kind, attention.part
    total = sum(shape[1] for shape in attention.shapes)
    rows: list[Head] = []
    wanted = Wanted(entry.recording.tokens or None)
    known = entry.typed.get(key)
    for row in known[0] if known else found(entry, place, wanted, alive):
        rows.append(row)
        yield {"done": len(rows), "of": total, "row": line(row)}
    notes = known[1] if known else list(wanted.notes(attention.kind))
    entry.typed[key] = rows, notes
    yield {"detectors": list(rows[0].scores) if rows else [], "notes": notes}


def found(entry: Entry, place: Place, wanted: Wanted, alive: Alive) -> Iterator[Head]:
    """Generate the rows of regard.heads, a layer at a time, or a head at a time where heads are large."""
    attention = entry.attention(place)
    for number, (b, h, q, k) in enumerate(attention.shapes):
        kind, part = attention.kind, attention.part
        apart = (alone(entry.recording, kind, part, number, head) for head in range(h))
        for recording in apart if b * q * k > APART else (entry.recording,):
            alive()
            yield from heads.each(recording, wanted, kind=kind, part=part, layers=[number])


def line(row: Head) -> dict[str, Any]:
    """Convert a row to JSON."""
    scores = {name: score if math.isfinite(score) else None for name, score in row.scores.items()}
    return {"layer": row.layer, "name": row.name, "head": row.head, "kind": row.kind, "scores": scores}
