"""The page as one HTML file that works offline, with its modules and all answers in it."""

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.atomic_write import describe_failed_write, write_atomically
from regard.errors import ConfigError, DataError
from regard.html_repr import HtmlFragment
from regard.map.pyramid import TILE
from regard.mechanism.arguments import check_path
from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.classification.head_scores import UserScore
from regard.observe.map_view import MapView
from regard.policy_audit import Audit
from regard.show.page.audit_page import render_audit
from regard.show.page.finding import find_finding
from regard.show.page.head_pictures import OpenedHead, stream_head
from regard.show.page.head_table import stream_head_table
from regard.show.page.image_entry import make_entry
from regard.show.page.image_places import iterate_rollout_codes
from regard.show.page.image_pulls import UNNAMED, iterate_pulls, limit_pull_heads
from regard.show.page.implicit_pictures import choose_file_pixels, iterate_implicit_pictures, note_limits
from regard.show.page.json_encoding import encode_json
from regard.show.page.module_bundle import bundle_modules
from regard.show.page.recording_entry import AttentionLayers, HeadPlace, RecordingEntry, summarize_entry, truncate_word
from regard.show.page.session import MAX_STEP_WORDS, get_limits, list_examples
from regard.show.page.steps_json import compute_head_steps, get_example_steps

STATIC = Path(__file__).parent / "static"
MAX_PICTURES_BYTES = 32 * 2**20  # of codes, before compression
MAX_SCORES_BYTES = 4 * 2**20
SHEET = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
MAIN = re.compile(r'<script type="module" src="static/([^"]+)"></script>')
NamedAnswer = tuple[str, bytes]  # the name by which the page requests an answer, and the answer


def page(
    recording: Recording | Audit,
    path: str | Path,
    *,
    scores: Sequence[UserScore] = (),
    image: Any = None,
    attribution: Attribution | None = None,
    number: str = UNNAMED,
) -> None:
    """Write the page of a recording, or of an audit, to one .html file, which needs neither server nor network.

    The file holds every weight where all heads together have at most some 11 million of them (36 heads of 512 tokens, say),
    else the zoom levels from the finest that fits on, which a note states. Weights are codes of 16 bits, see regard.map.codes;
    exact ones and scores are included where the heads together have at most a million. `scores` are functions of an
    AttentionMap for the table of the heads, as regard.heads takes them. `image` is what the model saw, or a list of several: a
    file, a PIL image, an array or a tensor; then the page shows what each patch and each word looks at in it. With
    `attribution`, recording.attribute(x), it also shows how each weight moved x, which `number` names in words, such as "the
    logit of cat": of every head, or as the mean over the heads, or not at all, where the entries would take more than 8 MiB.
    Raises ConfigError where nothing was recorded, a score is not such a function, the tokens are not known as patches of the
    image, the attribution is of another run, or the folder of the file does not exist; DataError where it cannot be written.
    """
    place = Path(check_path("path", path))
    if not isinstance(recording, Audit):
        check_recording(recording)
    if place.is_dir() or not place.parent.is_dir():
        raise ConfigError(
            f"path must be a file in an existing folder, got {place}: create the folder first, or choose another file."
        )
    if isinstance(recording, Audit):
        write_text(render_audit(recording), place)
        return
    write_file(make_entry(recording, scores, image, attribution, number), place)


def check_recording(recording: Recording) -> None:
    """Raise ConfigError for what is no recording, or an empty one."""
    if not isinstance(recording, Recording):
        raise ConfigError(f"recording must be a Recording, got {type(recording).__name__}: make one with regard.record(model).")
    if not any(run.calls for run in recording.runs):
        missed = recording.describe_missed()
        raise ConfigError(missed or "nothing was recorded: call the model while it is recorded, then write the page.")


def write_file(entry: RecordingEntry, place: Path, wanted: str | None = None) -> None:
    """Write the page of an entry to a file; it opens on the finding of the kind `wanted` where there is one."""
    write_text(render_page(entry, wanted), place)


def write_text(text: str, place: Path) -> None:
    """Write a page atomically. Raises DataError if its file cannot be written."""
    try:
        with write_atomically(place) as (partial,):
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(describe_failed_write("the page", place, error)) from None


def frame_page(recording: Recording, height: int, **settings: Any) -> HtmlFragment:
    """Return the page of a recording in a frame, `height` pixels high, that cannot reach the page around it or the network.

    `settings` are those of make_entry.
    """
    check_recording(recording)
    document = render_page(make_entry(recording, **settings), framed=True)
    frame = (
        f'<iframe srcdoc="{html.escape(document)}" sandbox="allow-scripts allow-downloads" '
        f'title="The attention of {html.escape(recording.model)}" '
        f'style="width: 100%; height: {height}px; border: 1px solid #8884"></iframe>'
    )
    return HtmlFragment(f"the page of {recording!r}, {len(document):,} bytes, which a notebook shows", frame)


def render_page(entry: RecordingEntry, wanted: str | None = None, framed: bool = False) -> str:
    """Return the page of an entry as HTML, see `write_file`; `framed` for the srcdoc of a frame."""
    finest = find_finest_level(entry)
    if finest:
        entry.notes.append(
            f"This file contains pictures with {2**finest} x {2**finest} weights per pixel and coarser, as many as fit; "
            "regard serve shows every weight."
        )
    entry.implicit_pixels = choose_file_pixels(entry.implicit_layers)
    entry.notes += note_limits(entry.implicit_layers, entry.implicit_pixels)
    entry.pull_heads, limits = limit_pull_heads(entry.pull_heads, entry.layer_shapes)
    entry.notes += limits
    parts = [render_script(name, data) for name, data in drop_repeated(iterate_answers(entry, finest, wanted))]
    return render_document(entry, parts, framed)


def find_finest_level(entry: RecordingEntry) -> int:
    """Find the finest zoom level at which the pictures of all heads, with those of all coarser levels, fit."""
    level = 0
    while count_picture_bytes(entry, level) > MAX_PICTURES_BYTES:
        level += 1
    return level


def count_picture_bytes(entry: RecordingEntry, level: int) -> int:
    """Compute the bytes of the codes of all heads from a level on: one picture of level 0, a mean and a max of all others."""
    found = 0
    for b, h, q, k in (shape for one in entry.attention_layers for shape in one.shapes):
        for z in range(level, max(find_coarsest_level(q, k), level) + 1):
            found += b * h * -(-q // 2**z) * -(-k // 2**z) * (2 if z == 0 else 4)
    return found


def find_coarsest_level(q: int, k: int) -> int:
    """Compute the level that is a single tile."""
    return max(max(q, k) - 1, 0).bit_length() - 8 if max(q, k) > TILE else 0


def iterate_answers(entry: RecordingEntry, finest: int, wanted: str | None) -> Iterator[NamedAnswer]:
    """Generate every answer, under the name by which file_source.js requests it."""
    yield from iterate_words(entry)
    for attention in entry.attention_layers:
        first = HeadPlace(attention.kind, attention.part)
        lines = b"".join(encode_json(line) + b"\n" for line in stream_head_table(entry, first, do_nothing))
        yield f"{entry.id}/heads?kind={first.kind}&part={first.part or ''}", lines
        for place in iterate_places(attention):
            yield from iterate_head_answers(entry, place, finest)
        if entry.images and attention.kind == "self":
            for layer, row, codes in iterate_rollout_codes(entry.recording, attention.part, attention.shapes):
                named = f"kind=self&part={attention.part or ''}&b={row}&layer={layer}"
                yield f"{entry.id}/rollout?{named}", encode_little_endian(codes, "<u2")
    if entry.pull:
        for (kind, part, layer), row, pulls in iterate_pulls(entry.pull, entry.pull_heads):
            yield f"{entry.id}/pull?kind={kind}&part={part or ''}&b={row}&layer={layer}", encode_little_endian(pulls, "<f4")
    for name, picture in iterate_implicit_pictures(entry.implicit_layers, entry.implicit_pixels, entry.get_implicit_map):
        yield f"{entry.id}/{name}", encode_little_endian(picture, "<f4")
    finding = find_finding(entry, do_nothing, wanted)
    yield f"{entry.id}/finding", encode_json({"finding": None if finding is None else finding.to_dict()})
    for one in list_examples():
        found = get_example_steps(one["name"], 0)
        yield f"example?name={one['name']}", encode_json(found)
        for head in range(1, found.get("heads") or 1):
            yield f"example?name={one['name']}&head={head}", encode_json(get_example_steps(one["name"], head))


def iterate_words(entry: RecordingEntry) -> Iterator[NamedAnswer]:
    """Generate the lists of words of each batch row that has its own."""
    for row in range(max(map(len, entry.word_lists[0].values()), default=0)):
        for name, words in entry.get_word_lists(row).items():
            yield f"{entry.id}/words?list={name}&b={row}", encode_json({"words": [truncate_word(word) for word in words]})


def iterate_places(attention: AttentionLayers) -> Iterator[HeadPlace]:
    """Generate the places of all heads of a kind and a part."""
    for layer, (b, h, _, _) in enumerate(attention.shapes):
        for row in range(b):
            for head in range(h):
                yield HeadPlace(attention.kind, attention.part, row, layer, head)


def compute_head_scores(view: MapView) -> Tensor:
    """Compute the scores (q, k) of a view of one matrix: -inf where a key is hidden, but for rows in which numbers hide all."""
    q, k = (torch.arange(n) for n in view.map.shape[2:])
    scores, seen = view.get_plane(0, 0).compute_masked_scores(q, k), view.can_see(0, 0, q.unsqueeze(-1), k)
    return scores.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)


def iterate_head_answers(entry: RecordingEntry, place: HeadPlace, finest: int) -> Iterator[NamedAnswer]:
    """Generate the answers about one head."""
    named = f"kind={place.kind}&part={place.part or ''}&b={place.b}&layer={place.layer}&head={place.head}"
    opened = OpenedHead(entry.get_map(place))
    *_, last = stream_head(entry, place, opened, do_nothing)
    yield f"{entry.id}/open?{named}", encode_json(last)
    for level in range(min(finest, opened.pyramid.levels - 1), opened.pyramid.levels):
        for how in ("mean", "max") if level else ("mean",):
            yield (
                f"{entry.id}/picture?{named}&level={level}&how={how}",
                encode_little_endian(join_tiles(opened, level, how), "<u2"),
            )
    q, k = entry.get_shape(place)[2:]
    if 4 * q * k * sum(shape[0] * shape[1] for one in entry.attention_layers for shape in one.shapes) <= MAX_SCORES_BYTES:
        look = MapView(opened.pyramid.map)
        yield f"{entry.id}/scores?{named}", encode_little_endian(compute_head_scores(look), "<f4")
        sink = look.get_plane(0, 0).sink
        if sink is not None and bool(sink.isfinite()):
            yield f"{entry.id}/sink?{named}", encode_json({"score": float(sink)})
    if max(q, k) <= MAX_STEP_WORDS:
        try:
            steps = compute_head_steps(entry, place, None, MAX_STEP_WORDS)
        except DataError as error:  # numbers that are not finite: the other views and heads can be shown
            steps = {"error": str(error)}
        for name in ("q", "k", "v"):
            if steps.get(name) is not None:
                steps[name], data = encode_table(entry, steps[name])
                yield steps[name]["name"], data
        yield f"{entry.id}/steps?{named}", encode_json(steps)


def encode_table(entry: RecordingEntry, rows: list[list[float]]) -> tuple[dict[str, Any], bytes]:
    """Encode a table as little-endian numbers of 32 bits if they hold its digits, else of 64, with what JSON says in its place.

    It is named by its content, so that a key head that several query heads share is stored once.
    """
    table = np.array(rows)
    kind = "<f4" if (table.astype("<f4") == table).all() else "<f8"
    data = table.astype(kind).tobytes()
    name = f"{entry.id}/numbers?{hashlib.sha256(data).hexdigest()[:24]}"
    return {"name": name, "bits": 32 if kind == "<f4" else 64, "columns": table.shape[-1]}, data


def drop_repeated(answers: Iterable[NamedAnswer]) -> Iterator[NamedAnswer]:
    """Generate the answers whose name did not occur before."""
    seen: set[str] = set()
    for name, data in answers:
        if name not in seen:
            seen.add(name)
            yield name, data


def join_tiles(opened: OpenedHead, level: int, how: str) -> Tensor:
    """Return the codes of a whole level."""
    rows, columns = (-(-pixels // TILE) for pixels in opened.pyramid.shape(level))
    lines = [[opened.pyramid.codes(level, r, c, how).to(torch.int32) for c in range(columns)] for r in range(rows)]  # type: ignore[arg-type]
    return torch.cat([torch.cat(line, 1) for line in lines])


def encode_little_endian(numbers: Tensor, kind: str) -> bytes:
    """Convert numbers to little-endian bytes."""
    return numbers.cpu().contiguous().numpy().astype(kind).tobytes()


def render_script(name: str, data: bytes) -> str:
    """Encode an answer as a script element that is not executed: base64 of gzip."""
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return f'<script type="application/json" data-name="{html.escape(name)}">"{packed}"</script>'


def render_document(entry: RecordingEntry, parts: list[str], framed: bool) -> str:
    """Return index.html with its style sheets, its modules and the answers in it.

    A link in a frame is relative to the page around it unless the document states its own base.
    """
    found = (STATIC / "index.html").read_text(encoding="utf-8")
    names = SHEET.findall(found)
    sheet = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names if (STATIC / name).is_file())
    (main,) = MAIN.findall(found)
    code = bundle_modules(STATIC, main)
    start = {
        "version": "",
        "model": None,
        "models": [],
        "writes": False,
        "translates": False,
        "translation": None,
        "recordings": [summarize_entry(entry)],
        "sentences": [],
        "examples": list_examples(),
        "gallery": [],
        "opening": None,
        "limits": get_limits(),
        "file": True,
    }
    scripts = [
        '<script type="application/json" '
        f'id="regard-start">{encode_json(start).decode().replace("<", chr(92) + "u003c")}</script>',
        *parts,
        f'<script type="module">{code}</script>',
    ]
    origin = "about:" if framed else "'none'"
    policy = (
        f"default-src 'none'; script-src '{compute_digest(code)}'; style-src '{compute_digest(sheet)}'; img-src data:; "
        f"base-uri {origin}; form-action 'none'"
    )
    base = '<base href="about:srcdoc">\n' if framed else ""
    found = MAIN.sub("", SHEET.sub("", found))
    head = f'{base}<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{sheet}</style>\n'
    return found.replace("<title>", f"{head}<title>", 1).replace("</body>", "\n".join([*scripts, "</body>"]), 1)


def compute_digest(text: str) -> str:
    """Compute the hash of an inline text for a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def do_nothing() -> None:
    """Do nothing: an `Alive` without a client that could disconnect."""
