"""A report as HTML: the verdict, each finding with its cure, who sees whom, and folded what was checked and what is unknown."""

import re
from collections.abc import Iterable

from regard.examination.report import Finding, Report
from regard.show.html_pictures import escape_html
from regard.show.visibility_picture import describe_picture, render_picture

INNER = r"[^()\[\]]*(?:[(\[][^()\[\]]*(?:[(\[][^()\[\]]*[)\]][^()\[\]]*)*[)\]][^()\[\]]*)*"  # nested brackets, three deep
CALL = rf"(?!(?:and|or)\b|e\.g\.|i\.e\.)~?\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*|\({INNER}\)|\[{INNER}\])*"
OPERATOR = r"(?:=| (?:[@*/+]?=|[@*/+]|if|else) )"
CODE_LINE = re.compile(rf"(?<![\w.(])(?:(?:\w+, )+(?=\w+ = ))?{CALL}(?:{OPERATOR}-?(?:\d[\d.]*\d|\d|{CALL}))*")
CODE_MARK = re.compile(r"[(\[=]|\.\w| [@+] ")  # what identifies code: a call, an assignment, an attribute, a sum
EDGE = "#c2571a"


def render_report(report: Report) -> str:
    """Render a report as HTML of a few kB, without a script."""
    mark = "✓" if report.ok else "?" if report.is_inconclusive else "✗"
    title = f"{mark} <b>{escape_html(report.subject)}</b>{escape_html(report.verdict.removeprefix(report.subject))}"
    parts = [f"<div>{title} (expects {render_code(report.expects)})</div>", *map(render_finding, report.findings)]
    missing = report.missing if report.is_inconclusive else ()
    parts += [render_finding(Finding("cannot tell", one.what, f"Needed: {one.needs}")) for one in missing]
    if report.reach is not None:
        parts.append(f'<div style="margin: 10px 0 2px">{render_picture(report.reach)}</div>')
        parts.append(f'<div style="opacity: 0.75; margin-bottom: 8px">{describe_picture(report.reach)}</div>')
    parts.append(render_details("What was checked", [(one.what, one.sensitivity) for one in report.checked]))
    parts.append(
        render_details(
            "What cannot be determined, and what to pass",
            [(one.what, one.needs) for one in report.unknown if one not in missing],
        )
    )
    parts += [f'<div style="opacity: 0.75">Called with {escape_html("; ".join(report.notes))}.</div>'] if report.notes else []
    return f'<div class="regard-report" style="max-width: 760px; line-height: 1.45">{"".join(parts)}</div>'


def render_document(report: Report) -> str:
    """Render a report as an HTML page of its own, in light and dark."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape_html(report.verdict)}</title><style>:root {{ color-scheme: light dark; }} "
        "body { font: 16px/1.45 system-ui, sans-serif; max-width: 800px; margin: 2em auto; padding: 0 1em; }</style></head>"
        f"<body>{render_report(report)}</body></html>\n"
    )


def render_finding(finding: Finding) -> str:
    """Render the kind and evidence of a finding, and below them its cure, with code set as code."""
    look = f"margin: 8px 0; padding-left: 10px; border-left: 3px solid {EDGE}"
    cure = f'<div style="margin-top: 3px">{mark_up_code(finding.cure)}</div>'
    return f'<div style="{look}"><b>{escape_html(finding.kind)}</b>: {escape_html(finding.evidence)}{cure}</div>'


def render_details(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Render lines as a closed details element; lines that end alike are joined."""
    groups: dict[str, list[str]] = {}
    for line, last in pairs:
        groups.setdefault(last, []).append(line)
    count = sum(map(len, groups.values()))
    lines = "".join(f"<li>{escape_html('; '.join(whats))}: {escape_html(last)}</li>" for last, whats in groups.items())
    fold = f'<details style="margin: 2px 0"><summary style="cursor: pointer">{title} ({count})</summary>'
    return f'{fold}<ul style="margin: 4px 0">{lines}</ul></details>' if count else ""


def mark_up_code(text: str) -> str:
    """Render a sentence with its code set as code."""
    parts, end = [], 0
    for found in CODE_LINE.finditer(text):
        if CODE_MARK.search(found[0]):
            parts += [escape_html(text[end : found.start()]), render_code(found[0])]
            end = found.end()
    return "".join([*parts, escape_html(text[end:])])


def render_code(text: str) -> str:
    """Render text as code."""
    return f"<code>{escape_html(text)}</code>"
