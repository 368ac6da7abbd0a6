"""The pages of an atlas: a page of all heads, and one of each head, as files that need no server and no network."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from regard.atomic_write import write_folder_atomically
from regard.head_atlas.atlas import Atlas
from regard.head_atlas.documents import DocumentStore
from regard.head_atlas.sampled_rows import DISTANCE_EDGES, SCORES
from regard.head_atlas.statistics import ELSEWHERE, EXAMPLES, POSITIONS, get_edges
from regard.observe.head_table import Head, Heads, describe_interval

STATIC = Path(__file__).parent / "static"
SITE = "site"
BEFORE, AROUND = 32, 6  # tokens shown before the query of an example, and on either side of a key farther back
SHOWN_WEIGHT = 0.1  # of a key farther back that is shown
SHOWN_EXAMPLE = 0.1  # the score of an example that is shown
STRONG = 0.6  # above this weight the text is light on dark
WIDTH, HEIGHT, MARGIN = 260, 96, 18  # of a picture, in its own units
DEFINITIONS = {
    "previous token": "weight on the token before the query",
    "itself": "weight on the query's own token",
    "duplicate": "weight on earlier occurrences of the query's token",
    "induction": "weight on what followed an earlier occurrence of the query's token",
    "first token": "weight on the first token of the document",
    "sink": "share of the queries with more than 0.3 on the first token",
    "local": "weight within 16 tokens",
    "distance": "mean distance of what is attended to, in tokens back",
    "keys": "e to the entropy: how many keys a query attends to",
    "entropy": "entropy of a query's weights, in nats",
    "breadth": "keys as a share of those the query may see",
    "punctuation": "weight on punctuation",
    "positional": "share of the variance of the weights that their distance explains",
    ELSEWHERE: "largest weight on a key that is neither the first, nor the query's own, nor the one before it",
}


def write_site(atlas: Atlas, documents: DocumentStore, table: Heads) -> None:
    """Write the pages into the folder "site" of the atlas, replacing former ones."""
    names = [name_head(row) for row in table]
    with write_folder_atomically(atlas.folder / SITE) as folder:
        for name in ("atlas.css", "atlas.js"):
            (folder / name).write_bytes((STATIC / name).read_bytes())
        texts = [list(iterate_texts(atlas, documents, n)) for n in range(len(table))]
        (folder / "atlas-data.js").write_text(f"const ATLAS = {make_data(table, texts)};\n", encoding="utf-8")
        (folder / "index.html").write_text(write_index(atlas, table), encoding="utf-8")
        for n, row in enumerate(table):
            (folder / f"{names[n]}.html").write_text(write_head(atlas, documents, table, n, row), encoding="utf-8")


def name_head(row: Head) -> str:
    """Return the name of a head, layer.head."""
    return f"{row.layer}.{row.head}"


def make_data(table: Heads, texts: Sequence[Sequence[str]]) -> str:
    """Return what the index needs of each head, as JSON."""
    heads = [
        {
            "name": name_head(row),
            "kind": row.kind,
            "sentence": row.sentence,
            "scores": {name: score.to_dict()["mean"] for name, score in row.scores.items()},
            "texts": texts[n],
        }
        for n, row in enumerate(table)
    ]
    return json.dumps({"heads": heads}, ensure_ascii=False, allow_nan=False)


def iterate_texts(atlas: Atlas, documents: DocumentStore, head: int) -> Iterator[str]:
    """Yield the texts of a head's examples, each once."""
    found: dict[str, None] = {}
    for place, rank in (atlas.state["example_scores"][:, head] >= SHOWN_EXAMPLE).nonzero().tolist():
        document, query = (int(atlas.state[name][place, head, rank]) for name in ("example_documents", "example_queries"))
        ids = documents[document][max(0, query - BEFORE) : query + 1].tolist()
        found["".join(documents.pieces[token] for token in ids)] = None
    yield from found


def write_page(title: str, body: str, scripts: Sequence[str] = ()) -> str:
    """Return an HTML document."""
    loaded = "".join(f'<script src="{name}"></script>\n' for name in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="stylesheet" href="atlas.css">\n<link rel="icon" href="data:,">\n'
        f"<body>\n{body}\n{loaded}</body>\n</html>\n"
    )


def write_index(atlas: Atlas, table: Heads) -> str:
    """Return the page of all heads."""
    kinds = dict.fromkeys(row.kind for row in table)
    counts = {kind: sum(row.kind == kind for row in table) for kind in sorted(kinds)}
    cells: dict[int, list[str]] = {}
    for row in table:
        name = name_head(row)
        cell = f'<td><a href="{name}.html" aria-label="head {name}" title="{escape(row.sentence)}"></a></td>'
        cells.setdefault(row.layer, []).append(cell)
    lines = "\n".join(f"<tr><th>{layer}</th>{''.join(row)}</tr>" for layer, row in cells.items())
    widest = max(map(len, cells.values()))
    heads = "".join(f"<th>{head}</th>" for head in range(widest))
    scores = "".join(f"<option>{escape(name)}</option>" for name in table.detectors)
    options = "".join(f'<option value="{escape(kind)}">{escape(kind)} ({count})</option>' for kind, count in counts.items())
    body = f"""<h1>The heads of {escape(atlas.plan.model)}</h1>
<p>{len(table)} heads. {render_note(table)} Each row of the grid is a layer, each column a head.</p>
<div class="controls">
<label>Color by <select id="score">{scores}</select></label>
<label>Kind <select id="kind"><option value="">all</option>{options}</select></label>
<label>Top examples containing <input id="text" type="search" placeholder="a word"></label>
</div>
<div class="columns">
<div><div class="scroll"><table class="grid"><tr><td></td>{heads}</tr>
{lines}
</table></div>
<p class="faint">0 <span class="legend"></span> <span id="largest"></span></p></div>
<div class="list"><p class="faint" id="count"></p>
<table class="heads"><thead><tr><th>head</th><th>kind</th><th>score</th><th>what it does, and how sure that is</th></tr></thead>
<tbody id="rows"></tbody></table></div>
</div>"""
    return write_page(f"Heads of {atlas.plan.model}", body, ("atlas-data.js", "atlas.js"))


def write_head(atlas: Atlas, documents: DocumentStore, table: Heads, n: int, row: Head) -> str:
    """Return the page of a head."""
    name = name_head(row)
    links = ['<a href="index.html">all heads</a>']
    links += [f'<a href="{name_head(table[n - 1])}.html">head {name_head(table[n - 1])}</a>'] if n else []
    links += [f'<a href="{name_head(table[n + 1])}.html">head {name_head(table[n + 1])}</a>'] if n + 1 < len(table) else []
    parts = [
        f"<nav>{''.join(links)}</nav>",
        f"<h1>Head {name} of {escape(atlas.plan.model)}</h1>",
        f"<p>{escape(row.sentence[:1].upper() + row.sentence[1:])}.</p>",
        f'<p class="faint">Kind: {escape(row.kind)}. Module: {escape(row.name)}. {render_note(table)}</p>',
        "<h2>Mean weight by distance</h2>",
        draw_distances(atlas, n),
        "<h2>Top examples</h2>",
        '<p class="faint">The outlined token is the query; the stronger the color of another, the more of its weight is on it. '
        "At most one example of a document.</p>",
        *render_examples(atlas, documents, n),
        "<h2>Scores</h2>",
        render_scores(row, {**DEFINITIONS, **table.definitions}),
        "<h2>Histograms</h2>",
        '<p class="faint">How many queries have each score.</p>',
        f'<div class="pictures">{"".join(draw_histogram(atlas, n, score) for score in SCORES if score != "sink")}</div>',
        "<h2>By position</h2>",
        '<p class="faint">The mean score, from 0 to 1, of the queries in a range of positions; each range is twice as long as '
        "the one before it.</p>",
        f'<div class="pictures">{"".join(draw_positions(atlas, n, score) for score in SCORES if score not in UNBOUNDED)}</div>',
    ]
    return write_page(f"Head {name} of {atlas.plan.model}", "\n".join(parts))


UNBOUNDED = ("distance", "keys", "entropy")


def render_note(table: Heads) -> str:
    """Return of what the table is, as HTML in which no line begins with a percent sign."""
    return escape(table.notes[0]).replace(" %", "&nbsp;%")


def render_scores(row: Head, definitions: Mapping[str, str]) -> str:
    """Return the table of a head's scores, with what each is."""
    lines = []
    for name, score in row.scores.items():
        count = f"{score.count:,}" if score.count else ""
        cells = (f"<td>{escape(name)}</td>", *(f'<td class="number">{text}</td>' for text in (describe_interval(score), count)))
        lines.append(f"<tr>{''.join(cells)}<td>{escape(definitions.get(name, ''))}</td></tr>")
    names = "<th>score</th>", '<th class="number">mean</th>', '<th class="number">queries</th>', "<th>the score is the</th>"
    titles = f"<tr>{''.join(names)}</tr>"
    return f'<div class="scroll"><table class="scores">{titles}{"".join(lines)}</table></div>'


def render_examples(atlas: Atlas, documents: DocumentStore, head: int) -> Iterator[str]:
    """Yield the examples of a head, each a text with a background that shows the weights of its query."""
    names = ("example_documents", "example_queries", "example_keys", "example_weights")
    for score, place in sort_example_scores(atlas, head):
        yield f"<h3>{escape(score)}: {escape(DEFINITIONS[score])}</h3>"
        for rank, value in enumerate(atlas.state["example_scores"][place, head].tolist()):
            if value >= SHOWN_EXAMPLE:
                found: list[Any] = [atlas.state[name][place, head, rank].tolist() for name in names]
                document, query, keys, weights = found
                text = render_text(documents, document, query, dict(zip(keys, weights, strict=True)))
                yield f'<p class="example">{text}</p>'
                yield f'<p class="faint">{value:.2f} in document {document:,}, token {query:,}</p>'


def sort_example_scores(atlas: Atlas, head: int) -> list[tuple[str, int]]:
    """Return the scores that have examples to show and their numbers, those first whose examples are highest on average."""
    shown = atlas.state["example_scores"][:, head].clamp(min=0)
    found = [(score, place) for place, score in enumerate(EXAMPLES) if float(shown[place].max()) >= SHOWN_EXAMPLE]
    return sorted(found, key=lambda one: -float(shown[one[1]].mean()))


def render_text(documents: DocumentStore, document: int, query: int, weights: dict[int, float]) -> str:
    """Return the tokens before a query, and those around the keys farther back that it attends to, as HTML."""
    ids = documents[document].tolist()
    shown = set(range(max(0, query - BEFORE), query + 1))
    for key, weight in weights.items():
        if weight >= SHOWN_WEIGHT:
            shown |= set(range(max(0, key - AROUND), min(len(ids), key + AROUND + 1)))
    parts, last = [], -1
    for place in sorted(shown):
        parts += [] if place == last + 1 else ['<span class="gap" style="--share: 0"> … </span>']
        parts.append(render_token(documents.pieces[ids[place]], weights.get(place, 0.0), place == query))
        last = place
    return "".join(parts)


def render_token(text: str, weight: float, is_query: bool) -> str:
    """Return a token as HTML with its weight as background and title; a line break is shown as a sign."""
    classes = " ".join(name for name, given in (("query", is_query), ("strong", weight > STRONG)) if given)
    own = escape(text.replace("\r", "").replace("\n", "↵") or "∅")
    if not weight >= 0.005 and not is_query:
        return own
    return f'<span class="{classes}" style="--share: {weight:.2f}" title="{weight:.3f}">{own}</span>'


def draw_histogram(atlas: Atlas, head: int, score: str) -> str:
    """Return the histogram of a score, as SVG with a caption; if the score has no limit, without the empty bins at the ends."""
    counts, edges = atlas.state["histogram"][SCORES.index(score), head].tolist(), get_edges(score).tolist()
    if score in UNBOUNDED and any(counts):
        places = [n for n, count in enumerate(counts) if count]
        counts, edges = counts[places[0] : places[-1] + 1], edges[places[0] : places[-1] + 2]
    most, step = max(*counts, 1), WIDTH / len(counts)
    bars = "".join(
        f'<rect class="bar" x="{n * step + 0.5:.1f}" y="{top:.1f}" width="{step - 1:.1f}" height="{HEIGHT - MARGIN - top:.1f}">'
        f"<title>{format_edge(edges[n])} to {format_edge(edges[n + 1])}: {count:,} queries</title></rect>"
        for n, count in enumerate(counts)
        if count
        for top in [(HEIGHT - MARGIN) * (1 - count / most)]
    )
    return draw_picture(bars, format_edge(edges[0]), format_edge(edges[-1]), score)


def draw_positions(atlas: Atlas, head: int, score: str) -> str:
    """Return the mean of a score by position, as SVG with a caption."""
    place = SCORES.index(score)
    counts = atlas.state["position_counts"][place, head].tolist()
    means = [
        total / count if count else None
        for total, count in zip(atlas.state["position_sums"][place, head].tolist(), counts, strict=True)
    ]
    last = max((n for n in range(POSITIONS) if any(atlas.state["position_counts"][:, head, n])), default=0)
    points = [(n / max(last, 1), mean) for n, mean in enumerate(means) if mean is not None]
    return draw_picture(draw_curve(points), "0", f"{2**last - 1:,}", score)


def draw_distances(atlas: Atlas, head: int) -> str:
    """Return the mean weight of a key by its distance, as SVG with a caption; the heights are logarithmic, from 1e-5 to 1."""
    sums, counts = atlas.state["distance_sums"][head].tolist(), atlas.state["distance_counts"][head].tolist()
    edges = DISTANCE_EDGES.tolist()
    known = [n for n, count in enumerate(counts) if count]
    points = [
        ((n - known[0]) / max(known[-1] - known[0], 1), 1 + math.log10(max(sums[n] / counts[n], 1e-5)) / 5) for n in known
    ]
    picture = draw_picture(draw_curve(points), f"{edges[known[0]]:,}", f"{edges[known[-1] + 1] - 1:,} tokens back", "")
    explanation = (
        "From the query's own token on the left; up to 32 tokens one by one, then in steps that grow. The height is "
        "logarithmic, from 0.00001 to 1."
    )
    return f'<div class="wide">{picture}</div><p class="faint">{explanation}</p>'


def draw_curve(points: Sequence[tuple[float, float]]) -> str:
    """Return a curve through points with coordinates from 0 to 1."""
    places = " ".join(f"{2 + x * (WIDTH - 4):.1f},{(1 - y) * (HEIGHT - MARGIN - 2) + 1:.1f}" for x, y in points)
    return f'<polyline class="curve" points="{places}"/>'


def draw_picture(drawing: str, left: str, right: str, caption: str) -> str:
    """Return an SVG with the ends of its axis and a caption."""
    axis = f'<line x1="0" y1="{HEIGHT - MARGIN}" x2="{WIDTH}" y2="{HEIGHT - MARGIN}"/>'
    ends = f'<text x="0" y="{HEIGHT - 4}">{left}</text><text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{right}</text>'
    label = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    size = f"0 0 {WIDTH} {HEIGHT}"
    return (
        f'<figure><svg viewBox="{size}" role="img" aria-label="{escape(caption)}">{axis}{drawing}{ends}</svg>{label}</figure>'
    )


def format_edge(x: float) -> str:
    """Return the edge of a bin."""
    return "no limit" if math.isinf(x) else f"{x:g}"
