"""python -m docs.pocket STORIES: the atlas of the pocket model on a file of stories, into docs/pocket.md and its pictures.

STORIES is a file of JSON lines, such as the recipe of the model writes. The pictures need Chromium.
"""

import sys
from collections import Counter
from pathlib import Path

from docs.chromium import launch_chromium
from playwright.sync_api import sync_playwright

import regard
from regard.models import GPT2
from regard.models.gpt2_adapter import GPT2Adapter
from regard.observe.head_table import Head, Heads, describe_interval

FOLDER, ATLAS = Path(__file__).parent, Path("build/pocket-atlas")
COLUMNS = ("previous token", "itself", "duplicate", "induction", "first token", "local", "positional")
PAGE = """\
# The heads of the pocket model

The [atlas](atlas.md) of the pocket model on stories that it was not trained on. {note}
`regard atlas --model pocket --on STORIES` makes the tables and the pages, `python -m docs.pocket STORIES` this page. On stories
hardly anything repeats in the same words, so that no head is surely an induction head here; on
[repeated random tokens](heads.md#probe-a-model) head 5.4 is one.

![A grid of six layers of six heads, one coloured most, and below it the heads with their sentences](pictures/atlas-model.png)

{kinds}

{heads}

![The page of a head: its mean weight by distance, and texts whose darker words receive more weight](pictures/atlas-head.png)
"""


def main() -> None:
    """Build the atlas and write the page."""
    table = regard.atlas(GPT2Adapter("pocket", GPT2.load("pocket")), Path(sys.argv[1]), ATLAS)
    assert table is not None
    kinds = Counter(row.kind for row in table)
    (FOLDER / "pocket.md").write_text(
        PAGE.format(
            note=table.notes[0],
            kinds="\n".join(["| kind | heads |", "| --- | --- |", *(f"| {kind} | {n} |" for kind, n in kinds.most_common())]),
            heads=format_heads(table),
        ),
        encoding="utf-8",
    )
    best = table.sort_by("induction")[0]
    draw_pages(f"{best.layer}.{best.head}")


def format_heads(table: Heads) -> str:
    """Return a table of all heads: kind, and scores with their intervals."""
    titles = f"| head | kind | {' | '.join(COLUMNS)} |"
    rule = "| --- " * (2 + len(COLUMNS)) + "|"
    return "\n".join([titles, rule, *(format_head(row) for row in table)])


def format_head(row: Head) -> str:
    """Return the line of a head."""
    return f"| {row.layer}.{row.head} | {row.kind} | {' | '.join(describe_interval(row.scores[name]) for name in COLUMNS)} |"


def draw_pages(head: str) -> None:
    """Take the pictures of the model's page and of a head's."""
    site = (ATLAS / "site").absolute().as_uri()
    pages = {"atlas-model": f"{site}/index.html#score=local", "atlas-head": f"{site}/{head}.html"}
    with sync_playwright() as playwright:
        browser = launch_chromium(playwright)
        page = browser.new_page(viewport={"width": 1100, "height": 760})
        for name, address in pages.items():
            page.goto(address)
            page.screenshot(path=FOLDER / "pictures" / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
