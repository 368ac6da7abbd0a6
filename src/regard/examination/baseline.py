"""Findings that a project keeps on purpose: they are listed as allowed, and only what is new makes a report false."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from regard.errors import DataError
from regard.examination.report import Finding, Report


@dataclass(frozen=True)
class Allowance:
    """A finding of a subject and a layer of it, "" for the whole, that is kept on purpose for a `reason`."""

    subject: str
    kind: str
    layer: str = ""
    reason: str = ""

    def covers(self, subject: str, kind: str, layer: str) -> bool:
        """Return whether it allows a kind of finding in a layer of a subject."""
        return (self.subject, self.kind, self.layer) == (subject, kind, layer)


def apply_allowances(report: Report, allowed: Sequence[Allowance]) -> Report:
    """Return the report without the allowed findings; its notes list them with their reasons, and those not found any more."""
    here = [one for one in allowed if one.subject == report.subject]
    places = {found: [(report.subject, found.kind, layer) for layer in list_layers(found)] for found in report.findings}
    new = tuple(
        found for found in report.findings if not all(any(one.covers(*place) for one in here) for place in places[found])
    )
    notes = list(report.notes)
    for one in here:
        is_found = any(one.covers(*place) for every in places.values() for place in every)
        where, state = f" in {one.layer}" if one.layer else "", "allowed" if is_found else "allowed, but not found any more"
        notes.append(f"{state}: {one.kind}{where} ({one.reason or 'no reason'})")
    return replace(report, findings=new, notes=tuple(notes))


def list_allowances(report: Report) -> list[Allowance]:
    """Return an allowance for each finding of a report, without a reason."""
    return list(dict.fromkeys(Allowance(report.subject, one.kind, x) for one in report.findings for x in list_layers(one)))


def list_layers(finding: Finding) -> tuple[str, ...]:
    """Return the layers of a finding, "" for the whole."""
    return finding.layers or (finding.layer,)


def read_baseline(path: Path) -> list[Allowance]:
    """Read the allowances in a file. Raises DataError if it cannot be read or is none."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["allowed"]
        return [make_allowance(one) for one in listed]
    except OSError as error:
        raise DataError(f"the baseline {path}: {error.strerror or error}. --write-baseline {path} makes one.") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(
            f'the baseline {path} is not {{"allowed": [{{"subject": ..., "kind": ..., "layer": ..., "reason": ...}}]}}.'
        ) from None


def make_allowance(given: Mapping[str, str]) -> Allowance:
    """Return an allowance of texts by name. Raises TypeError for other names or values."""
    if not all(isinstance(one, str) for one in given.values()) or set(given) - {one.name for one in fields(Allowance)}:
        raise TypeError(given)
    return Allowance(**given)


def format_baseline(allowed: Iterable[Allowance]) -> str:
    """Format allowances as the text of a baseline file."""
    return json.dumps({"allowed": [asdict(one) for one in allowed]}, indent=2, ensure_ascii=False) + "\n"
