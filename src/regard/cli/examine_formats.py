"""The formats of `regard examine --format` for other programs: SARIF, and the annotations of GitHub Actions."""

import inspect
import json
from typing import Any, NamedTuple

from torch import nn

from regard.examination.report import Report
from regard.examination.subject.adapters import find_held_module, get_uncompiled

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
INCONCLUSIVE = "inconclusive"


class SourceLine(NamedTuple):
    """The file and line where the class of a layer, or a function, is defined; "" and 1 if that is not known."""

    file: str = ""
    line: int = 1


class Entry(NamedTuple):
    """A line of the output: a finding, or that the report is inconclusive."""

    kind: str
    text: str
    layer: str
    is_error: bool


def locate_subject(subject: Any, layer: str = "") -> SourceLine:
    """Return the place of a subject, or of the module of this name in it."""
    plain = get_uncompiled(subject)
    module = find_held_module(plain)
    part = module.get_submodule(layer) if layer and module is not None else plain
    source = type(part) if isinstance(part, nn.Module) else inspect.unwrap(part) if inspect.isroutine(part) else part
    try:
        return SourceLine(inspect.getsourcefile(source) or "", inspect.getsourcelines(source)[1] or 1)
    except (TypeError, OSError):  # a C function, or code without a file
        return SourceLine()


def list_entries(report: Report) -> list[Entry]:
    """Return an entry for each finding, or the first thing that a verdict lacks."""
    found = [Entry(one.kind, f"{one.evidence}. {one.cure}", one.layer, True) for one in report.findings]
    if report.is_inconclusive:
        one = report.missing[0]
        found.append(Entry(INCONCLUSIVE, f"cannot tell {one.what}. Needed: {one.needs}", "", False))
    return found


def render_annotations(report: Report, subject: Any) -> str:
    """Render a report as workflow commands of GitHub Actions, a line for each finding; "" if there is none."""
    lines = []
    for one in list_entries(report):
        place = locate_subject(subject, one.layer)
        where = f"file={escape_property(place.file)},line={place.line}," if place.file else ""
        title = escape_property(f"{report.subject}: {one.kind}")
        lines.append(f"::{'error' if one.is_error else 'warning'} {where}title={title}::{escape_data(one.text)}")
    return "\n".join(lines)


def escape_data(text: str) -> str:
    """Escape the message of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Escape a property of a workflow command."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def render_sarif(report: Report, subject: Any) -> str:
    """Render a report as SARIF 2.1.0: a result for each finding, at the class of its layer."""
    entries = list_entries(report)
    rules = [{"id": kind} for kind in dict.fromkeys(one.kind for one in entries)]
    results = [make_result(report, subject, one) for one in entries]
    run = {"tool": {"driver": {"name": "regard examine", "rules": rules}}, "results": results}
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def make_result(report: Report, subject: Any, one: Entry) -> dict[str, Any]:
    """Return the SARIF result of an entry."""
    place = locate_subject(subject, one.layer)
    where: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": ".".join(filter(None, (report.subject, one.layer)))}]}
    if place.file:
        region = {"startLine": place.line}
        where["physicalLocation"] = {"artifactLocation": {"uri": place.file}, "region": region}
    level = "error" if one.is_error else "warning"
    return {"ruleId": one.kind, "level": level, "message": {"text": one.text}, "locations": [where]}
