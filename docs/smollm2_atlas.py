"""python -m docs.smollm2_atlas FOLDER: the heads of SmolLM2-135M-Instruct over many documents, into docs/smollm2_atlas.md.

FOLDER is the atlas that `python -m recipes.atlas smollm2 --data TEXTS` writes, finished or not.
"""

import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np

from regard.head_atlas.atlas import Atlas, read_atlas
from regard.head_atlas.documents import DocumentStore
from regard.head_atlas.plan import get_shard_path
from regard.observe.classification.head_kinds import RULES, UNCLEAR
from regard.observe.head_table import Head, Heads, describe_interval

PAGE = Path(__file__).with_suffix(".md")
MOST = 12  # heads of a kind whose scores are listed
OTHERS = ("positional", "entropy", "distance")  # scores that are listed beside the one that names a kind
PAGE_TEXT = """\
# The heads of SmolLM2 over many documents

The [atlas](atlas.md) of the {count} heads of SmolLM2-135M-Instruct on Shakespeare's plays (Tiny Shakespeare) and The Verdict by
Edith Wharton, both in the public domain, and on the articles of the test and validation sets of WikiText-2 (from Wikipedia,
CC BY-SA 3.0), {all_tokens} tokens in all.

{note} These documents have {tokens} tokens.{computed}

`python -m recipes.atlas smollm2 --data TEXTS` makes the tables and the pages, `python -m docs.smollm2_atlas FOLDER` this page.

{kinds}

Of each kind, the {most} heads with the highest score at most. `positional` is the share of the variance of the weights that
distance alone explains, `entropy` is in nats, `distance` in tokens back.

{tables}
"""


def main() -> None:
    """Read the atlas and write the page."""
    atlas = read_atlas(sys.argv[1], unfinished=True)
    documents, table = DocumentStore.open(atlas.folder), atlas.heads
    kinds = Counter(row.kind for row in table)
    computed = list_shards(atlas)
    PAGE.write_text(
        PAGE_TEXT.format(
            count=len(table),
            note=table.notes[0].replace(". ", ".\n"),
            all_tokens=f"{int(documents.ends[-1]):,}",
            tokens=f"{count_tokens(atlas, documents, computed):,}",
            computed=describe_rest(atlas, computed),
            kinds="\n".join(["| kind | heads |", "| --- | --- |", *(f"| {kind} | {n} |" for kind, n in kinds.most_common())]),
            most=MOST,
            tables="\n\n".join(format_kind(table, kind) for kind, _ in kinds.most_common() if kind != UNCLEAR),
        ),
        encoding="utf-8",
    )


def list_shards(atlas: Atlas) -> list[int]:
    """Return the numbers of the shards that are computed."""
    return [n for n in range(atlas.plan.shards) if get_shard_path(atlas.folder, n).exists()]


def count_tokens(atlas: Atlas, documents: DocumentStore, shards: list[int]) -> int:
    """Count the tokens of the documents of some shards."""
    lengths = np.diff(documents.ends, prepend=0)
    return sum(int(lengths[atlas.plan.get_documents(n)].sum()) for n in shards)


def describe_rest(atlas: Atlas, shards: list[int]) -> str:
    """Return which documents are not in the statistics; empty if all are."""
    if atlas.documents == atlas.plan.documents:
        return ""
    last = atlas.plan.get_documents(shards[-1])[-1] + 1
    return (
        f"\nThe run was stopped here: they are {len(shards)} of {atlas.plan.shards} shards, spread over the first {last:,} "
        "documents. The same command\ncontinues it."
    )


def format_kind(table: Heads, kind: str) -> str:
    """Return a table of the heads of a kind with the highest scores, and the names of the others."""
    score = RULES.get(kind, kind)
    rows = list(table.select_kind(kind).sort_by(score))
    columns = (score, *OTHERS)
    lines = [f"| {row.layer}.{row.head} | {' | '.join(format_scores(row, columns))} |" for row in rows[:MOST]]
    others = textwrap.fill(f"And {', '.join(f'{row.layer}.{row.head}' for row in rows[MOST:])}.", 128)
    titles = f"| head | {' | '.join(columns)} |", f"|{' --- |' * (1 + len(columns))}"
    parts = [f"**{kind}**, {len(rows)} head{'s' * (len(rows) != 1)}", "\n".join([*titles, *lines])]
    return "\n\n".join([*parts, others] if rows[MOST:] else parts)


def format_scores(row: Head, names: tuple[str, ...]) -> list[str]:
    """Return scores with their intervals."""
    return [describe_interval(row.scores[name]) for name in names]


if __name__ == "__main__":
    main()
