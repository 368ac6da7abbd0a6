"""The page as one HTML file that works offline, with its modules and all answers in it."""

import base64
import gzip
import hashlib
import html
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.pyramid import TILE
from regard.mechanism.arguments import check_path
from regard.observe import Recording
from regard.observe.look import Look
from regard.show.page.encoding import dumped
from regard.show.page.entry import Attention, Entry, Place, short, summary
from regard.show.page.kinds import typing
from regard.show.page.pictures import Opened, opening
from regard.show.page.session import STEPS, examples, limits
from regard.show.page.steps import example_steps, steps_of
from regard.writing import whole

STATIC = Path(__file__).parent / "static"
PICTURES_BYTES = 32 * 2**20  # of codes, before compression
SCORES_BYTES = 4 * 2**20
IMPORT = re.compile(r'(\bfrom\s+|\bimport\s+)"(\.{1,2}/[^"]+)"')
SHEET = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
MAIN = re.compile(r'<script type="module" src="static/([^"]+)"></script>')
Packed = tuple[str, bytes]  # the name by which the page requests an answer, and the answer


def page(recording: Recording, path: str | Path) -> None:
    """Write the page of a recording to one .html file, which needs neither server nor network.

    The file holds every weight where all heads together have at most some 11 million of them (36 heads of 512 tokens, say),
    else the zoom levels from the finest that fits on, which a note states. Weights are codes of 16 bits, see regard.map.codes;
    exact ones and scores are included where the heads together have at most a million. Raises ConfigError where nothing was
    recorded, or the folder of the file does not exist.
    """
    place = Path(check_path("path", path))
    if not isinstance(recording, Recording):
        raise ConfigError(
            f"a page is written of a recording, got {type(recording).__name__}: with regard.record(model) makes one."
        )
    if place.is_dir() or not place.parent.is_dir():
        raise ConfigError(f"{place} must be a file in a folder that is there; make the folder first, or name another file.")
    if not any(run.calls for run in recording.runs):
        raise ConfigError("nothing was recorded: a page needs a recording of a model that was called.")
    entry = Entry("r1", recording)
    finest = finest_level(entry)
    if finest:
        entry.notes.append(
            f"This file holds pictures of {2**finest} x {2**finest} weights a pixel and coarser, as many as fit; "
            "regard serve shows every weight."
        )
    parts = [script(name, data) for name, data in entries(entry, finest)]
    with whole(place) as (beside,):
        beside.write_text(document(entry, parts), encoding="utf-8")


def finest_level(entry: Entry) -> int:
    """Find the finest zoom level at which the pictures of all heads, with those of all coarser levels, fit."""
    level = 0
    while pictures_bytes(entry, level) > PICTURES_BYTES:
        level += 1
    return level


def pictures_bytes(entry: Entry, level: int) -> int:
    """Compute the bytes of the codes of all heads from a level on: one picture of level 0, a mean and a max of all others."""
    found = 0
    for b, h, q, k in (shape for one in entry.attentions for shape in one.shapes):
        for z in range(level, max(coarsest(q, k), level) + 1):
            found += b * h * -(-q // 2**z) * -(-k // 2**z) * (2 if z == 0 else 4)
    return found


def coarsest(q: int, k: int) -> int:
    """Compute the level that is a single tile."""
    return max(max(q, k) - 1, 0).bit_length() - 8 if max(q, k) > TILE else 0


def entries(entry: Entry, finest: int) -> Iterator[Packed]:
    """Generate every answer, under the name by which file.js requests it."""
    for name, words in entry.lists().items():
        yield f"{entry.id}/words?list={name}", dumped({"words": [short(word) for word in words]})
    for attention in entry.attentions:
        first = Place(attention.kind, attention.part)
        lines = b"".join(dumped(line) + b"\n" for line in typing(entry, first, never))
        yield f"{entry.id}/heads?kind={first.kind}&part={first.part or ''}", lines
        for place in places(attention):
            yield from of_head(entry, place, finest)
    for one in examples():
        found = example_steps(one["name"], 0)
        yield f"example?name={one['name']}", dumped(found)
        for head in range(1, found.get("heads") or 1):
            yield f"example?name={one['name']}&head={head}", dumped(example_steps(one["name"], head))


def places(attention: Attention) -> Iterator[Place]:
    """Generate the places of all heads of a kind and a part."""
    for layer, (b, h, _, _) in enumerate(attention.shapes):
        for row in range(b):
            for head in range(h):
                yield Place(attention.kind, attention.part, row, layer, head)


def of_head(entry: Entry, place: Place, finest: int) -> Iterator[Packed]:
    """Generate the answers about one head."""
    named = f"kind={place.kind}&part={place.part or ''}&b={place.b}&layer={place.layer}&head={place.head}"
    opened = Opened(entry.map(place))
    *_, last = opening(entry, place, opened, never)
    yield f"{entry.id}/open?{named}", dumped(last)
    for level in range(min(finest, opened.pyramid.levels - 1), opened.pyramid.levels):
        for how in ("mean", "max") if level else ("mean",):
            yield f"{entry.id}/picture?{named}&level={level}&how={how}", little(level_of(opened, level, how), "<u2")
    q, k = entry.shape(place)[2:]
    if 4 * q * k * sum(shape[0] * shape[1] for one in entry.attentions for shape in one.shapes) <= SCORES_BYTES:
        look = Look(opened.pyramid.map)
        scores = look.plane(0, 0).masked(torch.arange(q), torch.arange(k))
        yield f"{entry.id}/scores?{named}", little(scores, "<f4")
    if max(q, k) <= STEPS:
        yield f"{entry.id}/steps?{named}", dumped(steps_of(entry, place, None, STEPS))


def level_of(opened: Opened, level: int, how: str) -> Tensor:
    """Return the codes of a whole level."""
    rows, columns = (-(-pixels // TILE) for pixels in opened.pyramid.shape(level))
    lines = [[opened.pyramid.codes(level, r, c, how).to(torch.int32) for c in range(columns)] for r in range(rows)]  # type: ignore[arg-type]
    return torch.cat([torch.cat(line, 1) for line in lines])


def little(numbers: Tensor, kind: str) -> bytes:
    """Convert numbers to little-endian bytes."""
    return numbers.cpu().contiguous().numpy().astype(kind).tobytes()


def script(name: str, data: bytes) -> str:
    """Encode an answer as a script element that is not executed: base64 of gzip."""
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="application/json" data-name="{html.escape(name)}">"{packed}"</script>'


def document(entry: Entry, parts: list[str]) -> str:
    """Return index.html with its style sheets, its modules and the answers in it."""
    found = (STATIC / "index.html").read_text(encoding="utf-8")
    names = SHEET.findall(found)
    sheet = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names if (STATIC / name).is_file())
    (main,) = MAIN.findall(found)
    table = json.dumps({"imports": modules()})
    boot = f'import "regard/{main}";'
    start = {
        "version": "",
        "model": None,
        "writes": False,
        "translates": False,
        "translation": None,
        "recordings": [summary(entry)],
        "sentences": [],
        "examples": examples(),
        "limits": limits(),
        "file": True,
    }
    scripts = [
        f'<script type="importmap">{table}</script>',
        f'<script type="application/json" id="regard-start">{dumped(start).decode().replace("<", chr(92) + "u003c")}</script>',
        *parts,
        f'<script type="module">{boot}</script>',
    ]
    policy = (
        f"default-src 'none'; script-src data: '{digest(table)}' '{digest(boot)}'; style-src '{digest(sheet)}'; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'"
    )
    found = MAIN.sub("", SHEET.sub("", found))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{sheet}</style>\n'
    return found.replace("<title>", f"{head}<title>", 1).replace("</body>", "\n".join([*scripts, "</body>"]), 1)


def modules() -> dict[str, str]:
    """Return every module by its bare name as a data: URL, with its imports by bare names too."""
    found = {}
    for path in sorted(STATIC.rglob("*.js")):
        name = path.relative_to(STATIC).as_posix()
        folder = posixpath.dirname(name)
        code = IMPORT.sub(
            lambda m, folder=folder: f'{m[1]}"regard/{posixpath.normpath(posixpath.join(folder, m[2]))}"',  # type: ignore[misc]
            path.read_text(encoding="utf-8"),
        )
        found[f"regard/{name}"] = "data:text/javascript;base64," + base64.b64encode(code.encode()).decode()
    return found


def digest(text: str) -> str:
    """Compute the hash of an inline text for a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def never() -> None:
    """Do nothing: an `Alive` without a client that could disconnect."""
