"""python -m docs.smollm2_audit: what policies drop from SmolLM2-135M-Instruct, into docs/audit.md.

With --run, the model also runs with some of them, and the page has what that does to its predictions.
Needs --model smollm2 (see docs/heads.md) and Tiny Shakespeare, which lies beside the repository where its tests find it.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from docs.smollm2 import TEXT
from torch import Tensor

import regard
from benchmarks import machine
from regard.cli.model_loading import CAUSAL_LM, SMOLLM2, TextModel, load_model
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
from regard.policy_audit import Downstream, Summary, find_needles, make_needle_tasks, measure_downstream
from regard.show.audit_figure import draw_recall_curves

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs" / "audit.md", ROOT / "docs" / "pictures" / "audit-recall.svg"
BEGIN, END = "<!-- measured: written by python -m docs.smollm2_audit -->", "<!-- end of what it writes -->"
TOKENS, PROMPT = 1024, 512
BUDGETS, RUN = (0.05, 0.1, 0.2, 0.5), (0.1, 0.5)  # that are audited, and with which the model runs as well
MEAN_KEYS = (PROMPT + TOKENS + 1) / 2  # that a query after the prompt sees
ROTARY_BASE = 100_000.0  # of SmolLM2
WINDOW, PAGE_KEYS = 16, 8  # of SnapKV and of Quest: 5 % of the prompt are 25 keys
NEEDLE_TOKENS, NEEDLES = 512, 3
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


@dataclass(frozen=True)
class Line:
    """What a policy keeps at a budget, and what the model does with it."""

    name: str
    budget: float
    kept: Summary
    after: Downstream | None = None
    needles: int = 0


def main() -> None:
    """Measure and write the page's section and its figure."""
    start = time.perf_counter()
    foreign = load_model(SMOLLM2, CAUSAL_LM)
    text = TEXT.read_text(encoding="utf-8")
    ids = torch.tensor([foreign.encode(text)[:TOKENS]])
    places = [(name, budget) for name in POLICIES for budget in BUDGETS]
    summaries = measure_kept(foreign, ids, [POLICIES[name](budget) for name, budget in places])
    print(f"audited after {time.perf_counter() - start:.0f} s", flush=True)
    running = [place for place in places if place[1] in RUN] if "--run" in sys.argv else []
    policies = [POLICIES[name](budget) for name, budget in running]
    predicted = measure_downstream(foreign.model, ids, policies, prompt=PROMPT) if running else []
    print(f"run with each policy after {time.perf_counter() - start:.0f} s", flush=True)
    needles, complete = count_needles(foreign, text, policies) if running else ([], 0)
    effects = {place: (after, found) for place, after, found in zip(running, predicted, needles, strict=True)}
    lines = [Line(*place, kept, *effects.get(place, ())) for place, kept in zip(places, summaries, strict=True)]
    draw_recall_curves(
        {name: [(line.kept.keys / MEAN_KEYS, line.kept.recall) for line in lines if line.name == name] for name in POLICIES}
    ).savefig(FIGURE)
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{describe(lines, complete)}\n\n{END}{after}", encoding="utf-8")


def measure_kept(foreign: TextModel, ids: Tensor, policies: list[Policy]) -> list[Summary]:
    """Return the summary of each policy after the prompt."""
    with torch.inference_mode(), regard.record(foreign.model, keep="values") as recording:
        foreign.model(ids)
    return regard.audit(recording, policies, prompt=PROMPT).summarize()


def count_needles(foreign: TextModel, text: str, policies: list[Policy]) -> tuple[list[int], int]:
    """Return how many single needles are found with each policy, of those that the model finds, and their number."""
    tasks = make_needle_tasks(foreign, text, length=NEEDLE_TOKENS, kinds=["single"], count=NEEDLES)
    whole = find_needles(foreign.model, tasks, None)
    answered = [task for task, found in zip(tasks, whole, strict=True) if found]
    if not answered:
        return [0] * len(policies), 0
    return [sum(find_needles(foreign.model, answered, policy)) for policy in policies], len(answered)


def describe_line(line: Line, complete: int, columns: int) -> str:
    """Write a line of the table; the last columns are empty where the model did not run."""
    kept, after = line.kept, line.after
    cells = [
        line.name,
        f"{line.budget:.0%}",
        f"{kept.keys:,.0f}",
        *(f"{x:.3f}" for x in (kept.recall, kept.low, kept.kl, kept.error)),
    ]
    if after is not None:
        cells += [f"{after.change:+.3f}", f"{after.kl:.3f}", f"{after.agreement:.0%}", f"{line.needles} of {complete}"]
    return f"| {' | '.join([*cells, *[''] * (columns - len(cells))])} |"


def rank(numbers: list[float]) -> list[float]:
    """Return the rank of each number."""
    order = sorted(range(len(numbers)), key=lambda n: numbers[n])
    return [float(order.index(n)) for n in range(len(numbers))]


def describe(lines: list[Line], complete: int) -> str:
    """Write the section."""
    measured = [line for line in lines if line.after is not None]
    names = ["policy", "budget", "keys", "recall", "5 %", "KL", "error"]
    names += ["loss", "KL of next token", "same", "needles"] if measured else []
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct (Q4_1, 30 layers of 9 heads) on the first {TOKENS:,} tokens of Tiny Shakespeare, of which "
            f"{PROMPT:,} are",
            f"the prompt: the {TOKENS - PROMPT:,} queries after it, of all heads, which see {MEAN_KEYS:,.0f} keys on average. "
            f"Measured on {machine.describe()}.",
            "",
            f"| {' | '.join(names)} |",
            "|" + " --- |" * len(names),
            *(describe_line(line, complete, len(names)) for line in lines),
            "",
            *(describe_correlations(measured) if measured else []),
            "![Recall against the keys that are used, a curve for each policy](pictures/audit-recall.svg)",
        ]
    )


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
