"""A pytest plugin: one test for each attention layer of a model, with what regard finds as the evidence.

A function with `@pytest.mark.attention(expects=...)` returns a layer, a function or a model. The fixture `examine_attention`
examines one inside a test. The evidence is in the properties of JUnit's XML.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regard.examination import Report

MARK = "attention"
HELP = (
    "attention(expects, sample, scale, offset, args, kwargs, strict, time_limit_seconds): the function returns a layer, a "
    "function or a model, and regard examines its attention, one test for each layer of a model"
)
MODEL = "model"  # the test of what belongs to no single layer


class AttentionError(Exception):
    """Raised by a test whose attention has findings, or whose report is inconclusive; the text is the report."""


class Examined:
    """What a marked function returns, and its report, made once for all its tests."""

    def __init__(self, make: Callable[[], Any], settings: dict[str, Any]) -> None:
        self.make, self.settings = make, settings

    @cached_property
    def subject(self) -> Any:
        """The layer, function or model."""
        return self.make()

    @cached_property
    def layers(self) -> list[str]:
        """The names of a model's attention layers; empty for a single layer or a function."""
        from regard.examination.whole_models.whole_model import list_attention_layers

        return list_attention_layers(self.subject, self.settings.get("sample"))

    @cached_property
    def report(self) -> "Report":
        """The report on it."""
        from regard.examination import examine

        return examine(self.subject, **self.settings)


class AttentionItem(pytest.Item):
    """The test of one layer, or of all that belongs to no single layer."""

    def __init__(self, *, examined: Examined, layer: str, place: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.examined, self.layer, self.place = examined, layer, place
        self.own_markers.extend(getattr(place, "pytestmark", []))
        self.keywords.update({mark.name: mark for mark in self.own_markers})

    def runtest(self) -> None:
        """Examine, and raise AttentionError for findings of this layer, or for an inconclusive report."""
        report = self.examined.report
        add_evidence(self, report, self.layer)
        others = set(self.examined.layers) if not self.layer else set()
        found = [
            one
            for one in report.findings
            if (self.layer in (one.layer, *one.layers) if self.layer else one.layer not in others)
        ]
        if found or (not self.layer and report.is_inconclusive):
            raise AttentionError(format_failure(report, self.layer))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report in place of a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, AttentionError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int, str]:
        """Return where the marked function stands, and the name of the test."""
        return self.path, inspect.getsourcelines(self.place)[1] - 1, self.name


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", HELP)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[AttentionItem] | None:
    """Return the tests of a function with the marker; None for anything else."""
    marks = [mark for mark in getattr(obj, "pytestmark", []) if mark.name == MARK] if inspect.isfunction(obj) else []
    if not marks or not collector.funcnamefilter(name) or not isinstance(collector, pytest.Module):
        return None
    assert inspect.isfunction(obj)
    if inspect.signature(obj).parameters:
        raise collector.CollectError(
            f"{name}: a function with @pytest.mark.attention returns what to examine, and takes nothing."
        )
    return list(make_items(collector, name, obj, Examined(obj, dict(marks[0].kwargs))))


def make_items(collector: Any, name: str, obj: Callable[..., Any], examined: Examined) -> Iterator[AttentionItem]:
    """Yield a test for the whole, and one for each layer of a model."""
    shared = {"examined": examined, "place": obj}
    layers = examined.layers
    yield AttentionItem.from_parent(collector, name=f"{name}[{MODEL}]" if layers else name, layer="", **shared)
    for layer in layers:
        yield AttentionItem.from_parent(collector, name=f"{name}[{layer}]", layer=layer, **shared)


def add_evidence(item: pytest.Item, report: "Report", layer: str) -> None:
    """Add what was found and checked to the properties of a test, which JUnit's XML holds."""
    item.user_properties.append(("verdict", report.verdict))
    for one in report.findings:
        if layer in ("", one.layer, *one.layers):
            item.user_properties.append((one.kind, f"{one.evidence}. {one.cure}"))
    if not layer:
        item.user_properties += [("checked", f"{one.what}: {one.sensitivity}") for one in report.checked]
        item.user_properties += [("cannot tell", f"{one.what}. Needed: {one.needs}") for one in report.unknown]


def format_failure(report: "Report", layer: str) -> str:
    """Return the report, or the findings of one layer."""
    if not layer:
        return str(report)
    found = [f"{one.kind}: {one.evidence}\n{one.cure}" for one in report.findings if layer in (one.layer, *one.layers)]
    return "\n\n".join([f"{report.subject}, {layer} (expects {report.expects})", *found])


@pytest.fixture
def examine_attention(request: pytest.FixtureRequest) -> Callable[..., "Report"]:
    """Return a function that examines as regard.examine does, and fails the test if the report is not true."""

    def check(subject: Any, **settings: Any) -> "Report":
        report = Examined(lambda: subject, settings).report
        add_evidence(request.node, report, "")
        if not report:
            pytest.fail(str(report), pytrace=False)
        return report

    return check
