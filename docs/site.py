"""python -m docs.site FOLDER, or `make site`: the gallery as files that any static host serves, with the documentation.

Each item of the gallery is a page in one file, which opens on its finding. With SmolLM2 where it is installed, else with the
pocket model. FOLDER/docs is the documentation, and FOLDER/atlas the pages of the atlas in build/pocket-atlas if there is one.
"""

import html
import shutil
import subprocess
import sys
from pathlib import Path

from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import is_smollm2_installed
from regard.cli.serve import load_page_model
from regard.show.page.finding import OpeningFinding
from regard.show.page.gallery import LONG, GalleryItem, list_gallery
from regard.show.page.recording_entry import RecordingEntry
from regard.show.page.session import Session
from regard.show.page.single_file import write_file

ROOT = Path(__file__).parents[1]
ATLAS = Path("build/pocket-atlas/site")
STYLE = """
:root { color-scheme: light dark; --paper: #f8f6f1; --ink: #1f1d1a; --line: #ddd8ce; --raised: #fffefb; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181d; --ink: #ece9e2; --line: #32363f; --raised: #1f2229; } }
body { margin: 0 auto; max-width: 70rem; padding: 2rem 1.25rem; font: 1rem/1.5 system-ui, sans-serif; background: var(--paper);
  color: var(--ink); }
h1, h2, p { margin: 0 0 0.5rem; } h2 { font-size: 1.1rem; } a { color: inherit; }
main ul { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1rem; padding: 0; }
main li { padding: 1rem; list-style: none; background: var(--raised); border: 1px solid var(--line); border-radius: 8px; }
"""


def main() -> None:
    """Write the site."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_gallery(folder, Session(None, load_page_model(SMOLLM2 if is_smollm2_installed() else "pocket")))
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-b", "html", ROOT / "docs", folder / "docs"], check=True)
    if ATLAS.is_dir():
        shutil.copytree(ATLAS, folder / "atlas", dirs_exist_ok=True)
    print(folder / "index.html")


def write_gallery(folder: Path, session: Session) -> None:
    """Write the items of a session's gallery, each as one file, and the page that lists them."""
    cards = []
    for item in list_gallery(session.adapter):
        if item.link is None and item.name != LONG:  # a page of one file holds no long text of many heads
            entry, finding = session.make_item(item, lambda: None)
            plain = RecordingEntry(entry.id, entry.recording)  # without what needs a model
            write_file(plain, folder / f"{item.name}.html", item.what)
            cards.append(render_card(item, entry.recording.model, finding))
    (folder / "index.html").write_text(render_index(cards), encoding="utf-8")


def render_card(item: GalleryItem, model: str, finding: OpeningFinding | None) -> str:
    """Return a link to an item, with the sentences of its finding."""
    view = "text" if item.view == "type" else item.view  # a file runs no model
    said = " ".join(finding.sentences[:-1]) if finding is not None else ""
    link = f"{item.name}.html#view={view}&amp;find=clearest"
    return f'<li><h2><a href="{link}">{html.escape(item.title)}</a></h2><p>{html.escape(f"{model}: {said}")}</p></li>'


def render_index(cards: list[str]) -> str:
    """Return the page that lists the gallery."""
    links = {"Documentation": "docs/index.html"} | ({"Atlas": "atlas/index.html"} if ATLAS.is_dir() else {})
    more = "".join(f'<p><a href="{link}">{name}</a></p>' for name, link in links.items())
    head = '<meta charset="utf-8"><title>regard</title><meta name="viewport" content="width=device-width, initial-scale=1">'
    intro = "What attention does in language models, exactly. Each page is one file, and needs no installation."
    body = f"<main><h1>regard</h1><p>{intro}</p><ul>{''.join(cards)}</ul>{more}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


if __name__ == "__main__":
    main()
