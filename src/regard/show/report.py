"""A report as HTML: the verdict, each finding with its cure, who sees whom, and folded what was checked and what is unknown."""

import html
import re
from collections.abc import Iterable

from regard.examination.report import Finding, Report
from regard.show.sight import picture, told
from regard.show.terminal import literal

INNER = r"[^()\[\]]*(?:[(\[][^()\[\]]*(?:[(\[][^()\[\]]*[)\]][^()\[\]]*)*[)\]][^()\[\]]*)*"  # nested brackets, three deep
CALL = rf"(?!(?:and|or)\b)~?\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\({INNER}\)|\[{INNER}\])*"
LINE = re.compile(rf"(?<![\w.(])(?:(?:\w+, )+(?=\w+ = ))?{CALL}(?:(?:=| (?:[=@*/]|if|else) )-?(?:\d[\d.]*\d|\d|{CALL}))*")
CODE = re.compile(r"[(\[=]|\.\w| @ ")  # what identifies code: a call, an assignment, an attribute
EDGE = "#c2571a"


def of_report(report: Report) -> str:
    """Render a report as HTML of a few kB, without a script."""
    mark = "✓" if report.ok else "✗"
    title = f"{mark} <b>{escape(report.subject)}</b>{escape(report.verdict.removeprefix(report.subject))}"
    parts = [f"<div>{title} (expects {code(report.expects)})</div>", *map(of_finding, report.findings)]
    if report.reach is not None:
        parts.append(f'<div style="margin: 10px 0 2px">{picture(report.reach)}</div>')
        parts.append(f'<div style="opacity: 0.75; margin-bottom: 8px">{told(report.reach)}</div>')
    parts.append(folded("What was checked", [(one.what, one.sensitivity) for one in report.checked]))
    parts.append(folded("What cannot be told, and what to pass", [(one.what, one.needs) for one in report.unknown]))
    parts += [f'<div style="opacity: 0.75">Called with {escape("; ".join(report.notes))}.</div>'] if report.notes else []
    return f'<div class="regard-report" style="max-width: 760px; line-height: 1.45">{"".join(parts)}</div>'


def document(report: Report) -> str:
    """Render a report as an HTML page of its own, in light and dark."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(report.verdict)}</title><style>:root {{ color-scheme: light dark; }} "
        "body { font: 16px/1.45 system-ui, sans-serif; max-width: 800px; margin: 2em auto; padding: 0 1em; }</style></head>"
        f"<body>{of_report(report)}</body></html>\n"
    )


def of_finding(finding: Finding) -> str:
    """Render the kind and evidence of a finding, and below them its cure, with code set as code."""
    look = f"margin: 8px 0; padding-left: 10px; border-left: 3px solid {EDGE}"
    cure = f'<div style="margin-top: 3px">{coded(finding.cure)}</div>'
    return f'<div style="{look}"><b>{escape(finding.kind)}</b>: {escape(finding.evidence)}{cure}</div>'


def folded(title: str, said: Iterable[tuple[str, str]]) -> str:
    """Render lines as a closed details element; lines that end alike are joined."""
    together: dict[str, list[str]] = {}
    for what, last in said:
        together.setdefault(last, []).append(what)
    count = sum(map(len, together.values()))
    lines = "".join(f"<li>{escape('; '.join(whats))}: {escape(last)}</li>" for last, whats in together.items())
    fold = f'<details style="margin: 2px 0"><summary style="cursor: pointer">{title} ({count})</summary>'
    return f'{fold}<ul style="margin: 4px 0">{lines}</ul></details>' if count else ""


def coded(text: str) -> str:
    """Render a sentence with its code set as code."""
    parts, end = [], 0
    for found in LINE.finditer(text):
        if CODE.search(found[0]):
            parts += [escape(text[end : found.start()]), code(found[0])]
            end = found.end()
    return "".join([*parts, escape(text[end:])])


def code(text: str) -> str:
    """Render text as code."""
    return f"<code>{escape(text)}</code>"


def escape(text: str) -> str:
    """Escape text for HTML, with control characters spelled out."""
    return html.escape(literal(text))
