"""The page of an audit, without a script: recall by budget, by layer and head and by position, and the worst rows."""

from collections.abc import Sequence
from pathlib import Path

from regard.policy_audit import Audit, Summary
from regard.show.color_ramp import choose_ink, shade
from regard.show.html_pictures import escape_html
from regard.show.svg_charts import Curve, draw_chart, draw_grid

STYLE = Path(__file__).parent / "static" / "style.css"
BINS = 32  # points of a curve along the text
WORST = 5  # rows of each policy that are listed
SHEET = """
body { max-width: 78rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
html { font: 100%/1.45 var(--sans); background: var(--paper); color: var(--ink); }
h1 { font: 600 1.5rem/1.2 var(--serif); margin: 0 0 0.3rem; }
h2 { font-size: 1rem; font-weight: 600; margin: 2rem 0 0.3rem; }
p { margin: 0.2rem 0 0.6rem; color: var(--faint); max-width: 60rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--faint); }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px var(--sans); }
svg .axis { stroke: var(--edge); } svg .line { stroke: var(--line); } svg .faint { fill: var(--faint); }
.s0 { --c: var(--strong); } .s1 { --c: var(--accent); } .s2 { --c: var(--edge); } .s3 { --c: var(--ink); }
.wide svg { min-width: 44rem; }
.curve { fill: none; stroke: var(--c); stroke-width: 1.8; } .dot { fill: var(--c); } svg .name { fill: var(--c); }
.grids { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } figure { margin: 0; } figcaption { font-size: 0.875rem; }
ol { padding-left: 1.4rem; } li { margin: 0.25rem 0; max-width: 60rem; }
"""


def render_audit(audit: Audit) -> str:
    """Render the page of an audit."""
    part = "generated" if audit.prompt < audit.recall.shape[-1] else "prompt"
    rows = audit.summarize(part)
    where = "after" if part == "generated" else "of"
    title, *_ = str(audit).splitlines()
    sections = [
        ("What is kept", "Recall is the share of a row's attention on the keys that are used.", render_table(rows)),
        (
            "Recall by budget",
            "Each point is a policy: the keys that a query uses on average, and its recall.",
            draw_budgets(rows),
        ),
        (
            "Recall by layer and head",
            f"A cell is the mean over the queries {where} the prompt; point at it for its number.",
            draw_heads(audit, part),
        ),
        (
            "Recall by position",
            f"The mean over all layers and heads; the prompt ends at query {audit.prompt:,}.",
            draw_positions(audit),
        ),
        ("Worst rows", "Those of which each policy keeps least.", list_worst(audit)),
    ]
    body = "".join(f"<section><h2>{name}</h2><p>{text}</p>{found}</section>" for name, text, found in sections)
    colors, *_ = STYLE.read_text(encoding="utf-8").partition("*, *::before")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape_html(title)}</title><style>{colors}{SHEET}</style></head>"
        f"<body><h1>Audit</h1><p>{escape_html(title)}.</p>{body}<p>{escape_html(audit.certificate.sentence)}</p></body></html>\n"
    )


def render_table(rows: Sequence[Summary]) -> str:
    """Render the summaries as a table."""
    titles = ("policy", "keys", "recall", "5 % quantile", "least", "KL, nats", "error of the output")
    lines = [
        [row.policy, f"{row.keys:,.0f}", *(f"{x:.4f}" for x in (row.recall, row.low, row.least, row.kl, row.error))]
        for row in rows
    ]
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape_html(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def draw_budgets(rows: Sequence[Summary]) -> str:
    """Draw recall against the number of keys; the budgets of one kind of policy are joined."""
    kinds = dict.fromkeys(row.policy.partition("(")[0] for row in rows)
    curves = [
        Curve(kind, sorted((row.keys, row.recall) for row in rows if row.policy.partition("(")[0] == kind)) for kind in kinds
    ]
    return f'<div class="wide">{draw_chart(curves, "keys of a query", "recall")}</div>'


def draw_positions(audit: Audit) -> str:
    """Draw recall along the text, a curve for each policy."""
    edges, means = audit.average_by_position("recall", BINS)
    middles, lines = ((edges[:-1] + edges[1:] - 1) / 2).tolist(), means.mean(1).tolist()
    curves = [Curve(label, list(zip(middles, line, strict=True))) for label, line in zip(audit.labels, lines, strict=True)]
    return f'<div class="wide">{draw_chart(curves, "position of the query", "recall", mark=audit.prompt - 0.5)}</div>'


def draw_heads(audit: Audit, part: str) -> str:
    """Draw the mean recall of each layer and head as a heat map for each policy."""
    means = audit.recall[..., audit.select_rows(part)].double().mean((2, 4)).tolist()  # (policy, layer, h)
    grids = [
        f"<figure>{draw_grid(values, audit.layers, audit.heads)}<figcaption>{escape_html(label)}</figcaption></figure>"
        for label, values in zip(audit.labels, means, strict=True)
    ]
    scale = "".join(
        f'<span style="background: rgb{shade(n / 4)}; color: rgb{choose_ink(shade(n / 4))}; padding: 0 0.6rem">{n / 4:g}</span>'
        for n in range(5)
    )
    return f'<div class="grids">{"".join(grids)}</div><p>rows are layers, columns are heads; recall {scale}</p>'


def list_worst(audit: Audit) -> str:
    """List the worst rows of each policy in words."""
    return "".join(
        f"<ol>{''.join(f'<li>{escape_html(row.sentence)}</li>' for row in audit.find_worst(WORST, n))}</ol>"
        for n in range(len(audit.policies))
    )
