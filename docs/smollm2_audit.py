"""python -m docs.smollm2_audit: what policies drop from SmolLM2-135M-Instruct, and what that does to it, into docs/audit.md.

It works in steps (a layer, a run of the model with a policy at a budget, needles with it), whose results it keeps in
build/smollm2-audit: started again, it goes on where it stopped. `--seconds N` stops it after the step in which N seconds are
over; the page is written when all steps are done. `--tokens N` is the length of the text, half of which is the prompt;
`--audit-only` leaves out the runs of the model.
Needs --model smollm2 (see docs/heads.md) and Tiny Shakespeare, which lies beside the repository where its tests find it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from docs.smollm2 import TEXT
from torch import Tensor

import regard
from benchmarks import machine
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.observe import Recording
from regard.policies import (
    H2O,
    TOVA,
    ExpectedAttention,
    Knorm,
    ObservedAttention,
    Oracle,
    Policy,
    Quest,
    SnapKV,
    StreamingLLM,
)
from regard.policy_audit import AuditCertificate, Downstream, NeedleTask, Summary, find_needles, make_needle_tasks
from regard.policy_audit.certificate import join_certificates
from regard.policy_audit.downstream import CompleteRun
from regard.policy_audit.needle_tasks import KINDS
from regard.policy_audit.summary import summarize_part
from regard.show.audit_figure import draw_recall_curves

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs" / "audit.md", ROOT / "docs" / "pictures" / "audit-recall.svg"
FOLDER = ROOT / "build" / "smollm2-audit"
BEGIN, END = "<!-- measured: written by python -m docs.smollm2_audit -->", "<!-- end of what it writes -->"
TOKENS, LAYERS = 8192, 30
BUDGETS = (0.05, 0.1, 0.2, 0.5)
ROTARY_BASE = 100_000.0  # of SmolLM2
WINDOW, PAGE_KEYS = 16, 8  # of SnapKV and of Quest: 5 % of 512 tokens are 25 keys
NEEDLE_TOKENS, NEEDLES = 2048, 4  # of a task, and tasks of each kind
POLICIES: dict[str, Callable[[float], Policy]] = {
    "Oracle": lambda budget: Oracle(budget),
    "Quest": lambda budget: Quest(budget, PAGE_KEYS),
    "H2O": lambda budget: H2O(budget),
    "TOVA": lambda budget: TOVA(budget),
    "SnapKV": lambda budget: SnapKV(budget, WINDOW),
    "ObservedAttention": lambda budget: ObservedAttention(budget),
    "ExpectedAttention": lambda budget: ExpectedAttention(budget, rotary_base=ROTARY_BASE),
    "Knorm": lambda budget: Knorm(budget),
    "StreamingLLM": lambda budget: StreamingLLM(budget=budget),
}
PLACES = [(name, budget) for name in POLICIES for budget in BUDGETS]


@dataclass(frozen=True)
class Line:
    """What a policy keeps at a budget, and what the model does with it; needles are those found of each kind."""

    name: str
    budget: float
    kept: Summary
    after: Downstream | None = None
    needles: tuple[int, ...] = ()


class Steps:
    """Results of steps by name, kept in a folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.start = folder, seconds, time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result of a step, computed unless it is kept. Ends the program when the time is over."""
        file = self.folder / f"{name}.pt"
        if not file.exists():
            spent = time.perf_counter() - self.start
            if spent > self.seconds:
                raise SystemExit(f"stopped before {name}, after {spent:,.0f} s; the same command goes on from there.")
            unfinished = file.with_suffix(".unfinished")
            torch.save(compute(), unfinished)
            unfinished.replace(file)
            print(f"{name}: {time.perf_counter() - self.start - spent:,.1f} s", flush=True)
        return torch.load(file, weights_only=True)


@dataclass
class Subject:
    """The model, its text, and what is measured of them, each when it is first needed."""

    tokens: int

    @property
    def prompt(self) -> int:
        """The tokens that are read at once."""
        return self.tokens // 2

    @cached_property
    def model(self) -> TextModel:
        """The model."""
        return load_model(SMOLLM2, CAUSAL_LM)

    @cached_property
    def text(self) -> str:
        """The text."""
        return TEXT.read_text(encoding="utf-8")

    @cached_property
    def ids(self) -> Tensor:
        """The first tokens of the text, (1, t)."""
        return torch.tensor([self.model.encode(self.text)[: self.tokens]])

    @cached_property
    def recording(self) -> Recording:
        """The attention of all layers."""
        with torch.inference_mode(), regard.record(self.model.model, keep="values") as recording:
            self.model.model(self.ids)
        return recording

    @cached_property
    def tasks(self) -> list[NeedleTask]:
        """The needle tasks of all kinds."""
        return make_needle_tasks(self.model, self.text, length=min(NEEDLE_TOKENS, self.tokens), count=NEEDLES)

    def audit_layer(self, layer: int) -> dict[str, Any]:
        """Return what each policy keeps in the rows after the prompt of a layer, (policy, b, h, q), and the certificate."""
        policies = [POLICIES[name](budget) for name, budget in PLACES]
        found = regard.audit(self.recording, policies, prompt=self.prompt, layers=[layer])
        rows = slice(self.prompt, None)
        names = ("recall", "kl", "output_error", "kept")
        measures = {name: getattr(found, name)[:, 0, ..., rows].clone() for name in names}
        return measures | {"certificate": found.certificate.to_dict()}

    @cached_property
    def complete(self) -> CompleteRun:
        """The model without a policy, which all runs with one are compared with."""
        return CompleteRun.compute(self.model.model, self.ids, self.prompt)

    def run_model(self, policy: Policy) -> dict[str, Any]:
        """Return what a policy does to the model's predictions."""
        return self.complete.compare(policy).to_dict()

    def find_needles(self, policy: Policy | None, answered: list[bool]) -> list[bool]:
        """Return whether the answer to each task is right; tasks that the complete model does not answer are left out."""
        tasks = [task for task, is_answered in zip(self.tasks, answered, strict=True) if is_answered]
        found = iter(find_needles(self.model.model, tasks, policy) if tasks else [])
        return [is_answered and next(found) for is_answered in answered]


def main() -> None:
    """Measure what is missing, and write the page's section and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--audit-only", action="store_true")
    options = parser.parse_args()
    steps, subject = Steps(FOLDER / str(options.tokens), options.seconds), Subject(options.tokens)
    layers = [steps.run(f"layer-{layer}", partial(subject.audit_layer, layer)) for layer in range(LAYERS)]
    summaries = [summarize_policy(n, layers) for n in range(len(PLACES))]
    lines, complete = [Line(*place, kept) for place, kept in zip(PLACES, summaries, strict=True)], ()
    if not options.audit_only:
        runs = [
            steps.run(f"run-{name}-{budget}", partial(subject.run_model, POLICIES[name](budget))) for name, budget in PLACES
        ]
        whole = steps.run("needles", lambda: subject.find_needles(None, [True] * len(subject.tasks)))
        found = [
            steps.run(f"needles-{name}-{budget}", partial(subject.find_needles, POLICIES[name](budget), whole))
            for name, budget in PLACES
        ]
        complete = count_by_kind(whole)
        lines = [
            Line(*place, kept, Downstream(**run), count_by_kind(one))
            for place, kept, run, one in zip(PLACES, summaries, runs, found, strict=True)
        ]
    mean_keys = (subject.prompt + options.tokens + 1) / 2  # that a query after the prompt sees
    draw_recall_curves(
        {name: [(line.kept.keys / mean_keys, line.kept.recall) for line in lines if line.name == name] for name in POLICIES}
    ).savefig(FIGURE)
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    certificate = join_certificates([AuditCertificate(**layer["certificate"]) for layer in layers])
    section = describe(lines, complete, certificate, options.tokens, mean_keys)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")


def summarize_policy(policy: int, layers: list[dict[str, Any]]) -> Summary:
    """Return the summary of a policy over all layers, by its number."""
    names = ("recall", "kl", "output_error", "kept")
    name, budget = PLACES[policy]
    measures = (torch.stack([layer[measure][policy] for layer in layers]) for measure in names)
    return summarize_part(POLICIES[name](budget).label, "generated", *measures)


def count_by_kind(found: list[bool]) -> tuple[int, ...]:
    """Count the tasks of each kind that are answered."""
    return tuple(sum(found[n * NEEDLES : (n + 1) * NEEDLES]) for n in range(len(KINDS)))


def describe_line(line: Line, complete: tuple[int, ...], columns: int) -> str:
    """Write a line of the table; the last columns are empty where the model did not run."""
    kept, after = line.kept, line.after
    cells = [
        line.name,
        f"{line.budget:.0%}",
        f"{kept.keys:,.0f}",
        *(f"{x:.3f}" for x in (kept.recall, kept.low, kept.kl, kept.error)),
    ]
    if after is not None:
        cells += [f"{after.change:+.3f}", f"{after.kl:.3f}", f"{after.agreement:.0%}", f"{after.residual[-1]:.3f}"]
        cells += [f"{n} of {most}" for n, most in zip(line.needles, complete, strict=True) if most]
    return f"| {' | '.join([*cells, *[''] * (columns - len(cells))])} |"


def rank(numbers: list[float]) -> list[float]:
    """Return the rank of each number."""
    order = sorted(range(len(numbers)), key=lambda n: numbers[n])
    return [float(order.index(n)) for n in range(len(numbers))]


def describe(lines: list[Line], complete: tuple[int, ...], certificate: AuditCertificate, tokens: int, mean_keys: float) -> str:
    """Write the section."""
    measured = [line for line in lines if line.after is not None]
    names = ["policy", "budget", "keys", "recall", "5 %", "KL", "error"]
    if measured:
        names += [
            "loss",
            "KL of next token",
            "same",
            "stream",
            *(kind for kind, most in zip(KINDS, complete, strict=True) if most),
        ]
    command = f"python -m docs.smollm2_audit --tokens {tokens}{'' if measured else ' --audit-only'}"
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct (Q4_1, 30 layers of 9 heads) on the first {tokens:,} tokens of Tiny Shakespeare, of which "
            f"{tokens // 2:,} are",
            f"the prompt: the {tokens - tokens // 2:,} queries after it, of all heads, which see {mean_keys:,.0f} keys on",
            f"average. Written by `{command}`. Measured on {machine.describe()}.",
            "",
            f"| {' | '.join(names)} |",
            "|" + " --- |" * len(names),
            *(describe_line(line, complete, len(names)) for line in lines),
            "",
            f"{certificate.sentence[0].upper()}{certificate.sentence[1:]}",
            "",
            *(describe_needles(complete) if measured else []),
            *(describe_correlations(measured) if measured else []),
            "![Recall against the keys that are used, a curve for each policy](pictures/audit-recall.svg)",
        ]
    )


def describe_needles(complete: tuple[int, ...]) -> list[str]:
    """Write what the tasks are, and how many of each kind the complete model answers."""
    counts = ", ".join(f"{most} of {kind}" for kind, most in zip(KINDS, complete, strict=True))
    return [
        f"Of {NEEDLES} tasks of each kind, of {NEEDLE_TOKENS:,} tokens, the complete model answers {counts}; the columns have",
        "how many of these are answered with a policy.",
        "",
    ]


def describe_correlations(measured: list[Line]) -> list[str]:
    """Write how well what an audit measures ranks the changes of the predictions."""
    divergences = [line.after.kl for line in measured if line.after is not None]
    correlations = {
        name: statistics.correlation(rank(numbers), rank(divergences))
        for name, numbers in {
            "recall": [1 - line.kept.recall for line in measured],
            "the KL of the weights": [line.kept.kl for line in measured],
            "the error of the output": [line.kept.error for line in measured],
        }.items()
    }
    words = ", ".join(f"{number:.2f} for {name}" for name, number in correlations.items())
    return [
        "Rank correlation (Spearman) of what an audit measures with the KL of the next token, over "
        f"{len(measured)} runs: {words}.",
        "",
    ]


if __name__ == "__main__":
    main()
