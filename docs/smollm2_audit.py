"""python -m docs.smollm2_audit: what policies drop from SmolLM2-135M-Instruct, and what that does to it, into docs/audit.md.

It works in steps (a layer, a run of the model with a policy at a budget, a needle task with all), whose results it keeps in
build/smollm2-audit: started again, it goes on where it stopped. `--seconds N` stops it after the step in which N seconds are
over; the page is written when all steps are done. `--tokens N` is the length of the text, half of which is the prompt;
`--audit-only` leaves out the runs of the model.
Needs --model smollm2 (see docs/heads.md) and Tiny Shakespeare, which lies beside the repository where its tests find it.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
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
    BlockSparse,
    DuoAttention,
    ExpectedAttention,
    Knorm,
    ObservedAttention,
    Oracle,
    Policy,
    Quantised,
    Quest,
    SnapKV,
    StreamingLLM,
    VerticalSlash,
)
from regard.policy_audit import AuditCertificate, Downstream, NeedleTask, Summary, find_needles, make_needle_tasks
from regard.policy_audit.certificate import join_certificates
from regard.policy_audit.downstream import CompleteRun
from regard.policy_audit.needle_tasks import KINDS
from regard.policy_audit.summary import summarize_part
from regard.probe.retrieval import make_needle_prompts, measure_retrieval
from regard.show.audit_figure import draw_recall_curves

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs" / "audit.md", ROOT / "docs" / "pictures" / "audit-recall.svg"
FOLDER = ROOT / "build" / "smollm2-audit"
BEGIN, END = "<!-- measured: written by python -m docs.smollm2_audit -->", "<!-- end of what it writes -->"
TOKENS, LAYERS = 8192, 30
BUDGETS = (0.05, 0.1, 0.2, 0.5)
ROTARY_BASE = 100_000.0  # of SmolLM2
WINDOW, PAGE_KEYS = 16, 8  # of SnapKV and of Quest: 5 % of 512 tokens are 25 keys
NEEDLE_TOKENS, NEEDLES = 8192, 4  # of a task, and tasks that are made of each kind
ASKED = {"single": 4}  # tasks of a kind that are asked, 2 of every other one: with all policies, one takes ten minutes
BITS = (2, 4, 8)  # of Quantised, whose budget is their share of 16
Heads = tuple[tuple[int, int], ...]
POLICIES: dict[str, Callable[[float, int, Heads], Policy]] = {  # of the budget, the length of the prompt, and all heads
    "Oracle": lambda budget, prompt, heads: Oracle(budget),
    "Quest": lambda budget, prompt, heads: Quest(budget, PAGE_KEYS),
    "H2O": lambda budget, prompt, heads: H2O(budget),
    "TOVA": lambda budget, prompt, heads: TOVA(budget),
    "SnapKV": lambda budget, prompt, heads: SnapKV(budget, WINDOW),
    "ObservedAttention": lambda budget, prompt, heads: ObservedAttention(budget),
    "ExpectedAttention": lambda budget, prompt, heads: ExpectedAttention(budget, rotary_base=ROTARY_BASE),
    "Knorm": lambda budget, prompt, heads: Knorm(budget),
    "StreamingLLM": lambda budget, prompt, heads: StreamingLLM(budget=budget),
    "DuoAttention": lambda budget, prompt, heads: DuoAttention(heads[: round(budget * len(heads))]),
    "Quantised": lambda budget, prompt, heads: Quantised(round(16 * budget)),
    "BlockSparse": lambda budget, prompt, heads: BlockSparse(budget),
    "VerticalSlash": lambda budget, prompt, heads: VerticalSlash(*[int(budget * prompt / 2)] * 2),
}
MEASURES = ("recall", "kl", "output_error", "kept")
IN_PROMPT = ("BlockSparse", "VerticalSlash")  # they change what the queries of the prompt read, the others what later ones do
PLACES = [(name, budget) for name in POLICIES for budget in ([x / 16 for x in BITS] if name == "Quantised" else BUDGETS)]


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
    def heads(self) -> Heads:
        """All heads (layer, head), those with the largest retrieval score first."""
        scores, _ = measure_retrieval(self.model.model, make_needle_prompts(self.model, self.text))
        return tuple(sorted(scores, key=lambda place: -scores[place]))

    def make_policies(self, prompt: int) -> list[Policy]:
        """Make the policy of each place for a prompt of some tokens."""
        return [POLICIES[name](budget, prompt, self.heads) for name, budget in PLACES]

    @cached_property
    def tasks(self) -> list[NeedleTask]:
        """The needle tasks of all kinds."""
        return make_needle_tasks(self.model, self.text, length=min(NEEDLE_TOKENS, self.tokens), count=NEEDLES)

    def audit_layer(self, layer: int) -> dict[str, Any]:
        """Return what each policy keeps in a layer, a list of (b, h, q) for each measure, and the certificate.

        The queries are those that the policy concerns: of the prompt, or after it.
        """
        found = regard.audit(self.recording, self.make_policies(self.prompt), prompt=self.prompt, layers=[layer])
        rows = [slice(None, self.prompt) if name in IN_PROMPT else slice(self.prompt, None) for name, _ in PLACES]
        measures = {
            name: [x[0][..., part].clone() for x, part in zip(getattr(found, name), rows, strict=True)] for name in MEASURES
        }
        return measures | {"certificate": found.certificate.to_dict()}

    @cached_property
    def complete(self) -> CompleteRun:
        """The model without a policy, which all runs with one are compared with."""
        return CompleteRun.compute(self.model.model, self.ids, self.prompt)

    def run_model(self, place: int) -> dict[str, Any]:
        """Return what the policy of a place does to the model's predictions."""
        return self.complete.compare(self.make_policies(self.prompt)[place]).to_dict()

    def find_needles(self, task: int) -> list[bool]:
        """Return whether the answer to a task is right: of the complete model, and then with the policy of each place."""
        needle = self.tasks[task]
        return [answer for (answer,) in find_needles(self.model.model, [needle], self.make_policies(needle.context))]


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
    lines, complete = [Line(*place, kept) for place, kept in zip(PLACES, summaries, strict=True)], tuple[int, ...]()
    if not options.audit_only:
        runs = [
            steps.run(f"run-{name}-{budget}", partial(subject.run_model, place)) for place, (name, budget) in enumerate(PLACES)
        ]
        asked = [n * NEEDLES + place for n, kind in enumerate(KINDS) for place in range(ASKED.get(kind, 2))]
        kinds = [KINDS[task // NEEDLES] for task in asked]
        answers = [steps.run(f"needles-{task}", partial(subject.find_needles, task)) for task in asked]
        complete, *found = (count_by_kind(kinds, found) for found in zip(*answers, strict=True))
        lines = [
            Line(*place, kept, Downstream(**run), needles)
            for place, kept, run, needles in zip(PLACES, summaries, runs, found, strict=True)
        ]
    mean_keys = (subject.prompt + options.tokens + 1) / 2  # that a query after the prompt sees
    drawn = [name for name in POLICIES if name not in (*IN_PROMPT, "Quantised")]  # which keep other queries' keys, and all keys
    draw_recall_curves(
        {name: [(line.kept.keys / mean_keys, line.kept.recall) for line in lines if line.name == name] for name in drawn}
    ).savefig(FIGURE)
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    certificate = join_certificates([AuditCertificate(**layer["certificate"]) for layer in layers])
    section = describe(lines, complete, certificate, options.tokens, mean_keys)
    PAGE.write_text(f"{before}{BEGIN}\n\n{section}\n\n{END}{after}", encoding="utf-8")


def summarize_policy(policy: int, layers: list[dict[str, Any]]) -> Summary:
    """Return the summary of a policy over all layers, by its number."""
    name, _ = PLACES[policy]
    measures = (torch.stack([layer[measure][policy] for layer in layers]) for measure in MEASURES)
    return summarize_part(name, "prompt" if name in IN_PROMPT else "generated", *measures)


def count_by_kind(kinds: Sequence[str], found: Sequence[bool]) -> tuple[int, ...]:
    """Count the tasks of each kind that are answered, from the kind of each."""
    return tuple(sum(answer for kind, answer in zip(kinds, found, strict=True) if kind == one) for one in KINDS)


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
            f"average. {', '.join(IN_PROMPT)} change the prompt alone: of them, keys, recall, KL and error are those of its",
            f"{tokens // 2:,} queries. VerticalSlash reads half of its budget in columns and half in diagonals. The budget of",
            "DuoAttention is the share of retrieval heads, those with the largest retrieval score (Wu et al. 2024) of",
            f"`regard heads --haystack`, that of Quantised its bits of 16. Written by `{command}`.",
            f"Measured on {machine.describe()}.",
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
    counts = ", ".join(f"{most} of {ASKED.get(kind, 2)} {kind}" for kind, most in zip(KINDS, complete, strict=True))
    return [
        f"Of the needle tasks, of {NEEDLE_TOKENS:,} tokens, the complete model answers {counts}; the columns have",
        "how many of these are answered with a policy.",
        "",
    ]


def describe_correlations(measured: list[Line]) -> list[str]:
    """Write how well what an audit measures ranks the changes of the predictions."""
    measured = [line for line in measured if line.name not in (*IN_PROMPT, "Quantised")]  # in which recall has another meaning
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
        f"{len(measured)} runs of policies that choose keys for later queries: {words}.",
        "",
    ]


if __name__ == "__main__":
    main()
