"""python -m docs.smollm2_audit: what policies drop from SmolLM2-135M-Instruct, and what it costs, into docs/audit.md.

Needs --model smollm2 (see docs/heads.md) and Tiny Shakespeare, which lies beside the repository where its tests find it.
"""

import statistics
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
from regard.policy_audit import Summary, find_needles, make_needle_tasks, measure_downstream
from regard.show.audit_figure import draw_recall_curves

ROOT = Path(__file__).parents[1]
PAGE, FIGURE = ROOT / "docs" / "audit.md", ROOT / "docs" / "pictures" / "audit-recall.svg"
BEGIN, END = "<!-- measured: written by python -m docs.smollm2_audit -->", "<!-- end of what it writes -->"
TOKENS, PROMPT = 2048, 1024
BUDGETS = (0.05, 0.1, 0.2, 0.5)
ROTARY_BASE = 100_000.0  # of SmolLM2
WINDOW = 32  # of SnapKV: 5 % of the prompt are 51 keys
NEEDLE_TOKENS, NEEDLES = 1024, 10
POLICIES: dict[str, Callable[[float], Policy]] = {
    "Oracle": lambda budget: Oracle(budget),
    "Quest": lambda budget: Quest(budget),
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
    change: float
    kl: float
    same: float
    needles: int


def main() -> None:
    """Measure and write the page's section and its figure."""
    start = time.perf_counter()
    foreign = load_model(SMOLLM2, CAUSAL_LM)
    text = TEXT.read_text(encoding="utf-8")
    ids = torch.tensor([foreign.encode(text)[:TOKENS]])
    policies = [make(budget) for make in POLICIES.values() for budget in BUDGETS]
    summaries, depths = measure_kept(foreign, ids, policies)
    predicted = measure_downstream(foreign.model, ids, policies, prompt=PROMPT)
    needles, complete = count_needles(foreign, text, policies)
    places = [(name, budget) for name in POLICIES for budget in BUDGETS]
    lines = [
        Line(*place, kept, after.change, after.kl, after.agreement, found)
        for place, kept, after, found in zip(places, summaries, predicted, needles, strict=True)
    ]
    loss = predicted[0].loss - predicted[0].change
    draw_recall_curves(
        {
            name: [(line.kept.keys / (TOKENS - 512), line.kept.recall) for line in lines if line.name == name]
            for name in POLICIES
        }
    ).savefig(FIGURE)
    seconds = time.perf_counter() - start
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{describe(lines, loss, complete, depths, seconds)}\n\n{END}{after}", encoding="utf-8")


def measure_kept(foreign: TextModel, ids: Tensor, policies: list[Policy]) -> tuple[list[Summary], dict[str, Tensor]]:
    """Return the summary of each policy after the prompt, and by policy the mean recall of each layer."""
    with torch.inference_mode(), regard.record(foreign.model, keep="values") as recording:
        foreign.model(ids)
    found = regard.audit(recording, policies, prompt=PROMPT)
    means = found.recall[..., found.select_rows("generated")].double().mean((2, 3, 4))
    return found.summarize(), dict(zip(found.labels, means, strict=True))


def count_needles(foreign: TextModel, text: str, policies: list[Policy]) -> tuple[list[int], int]:
    """Return how many single needles are found with each policy, of those that the model finds, and their number."""
    tasks = make_needle_tasks(foreign, text, length=NEEDLE_TOKENS, kinds=["single"], count=NEEDLES)
    whole = find_needles(foreign.model, tasks, None)
    answered = [task for task, found in zip(tasks, whole, strict=True) if found]
    if not answered:
        return [0] * len(policies), 0
    return [sum(find_needles(foreign.model, answered, policy)) for policy in policies], len(answered)


def rank(numbers: list[float]) -> list[float]:
    """Return the rank of each number."""
    order = sorted(range(len(numbers)), key=lambda n: numbers[n])
    return [float(order.index(n)) for n in range(len(numbers))]


def describe(lines: list[Line], loss: float, complete: int, depths: dict[str, Tensor], seconds: float) -> str:
    """Write the section."""
    rows = [
        f"| {line.name} | {line.budget:.0%} | {line.kept.keys:,.0f} | {line.kept.recall:.3f} | {line.kept.low:.3f} "
        f"| {line.kept.kl:.3f} | {line.kept.error:.3f} | {line.change:+.3f} | {line.kl:.3f} | {line.same:.0%} "
        f"| {line.needles} of {complete} |"
        for line in lines
    ]
    correlations = {
        name: statistics.correlation(rank(numbers), rank([line.kl for line in lines]))
        for name, numbers in {
            "recall": [1 - line.kept.recall for line in lines],
            "the KL of the weights": [line.kept.kl for line in lines],
            "the error of the output": [line.kept.error for line in lines],
        }.items()
    }
    words = ", ".join(f"{number:.2f} for {name}" for name, number in correlations.items())
    head = "| policy | budget | keys | recall | 5 % | KL | error | loss | KL of next token | same | needles |"
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct (Q4_1, 30 layers of 9 heads) on the first {TOKENS:,} tokens of Tiny Shakespeare, of which "
            f"{PROMPT:,} are the prompt; the loss with",
            f"everything is {loss:.3f} nats. Measured in {seconds / 60:.0f} minutes on {machine.describe()}.",
            "",
            head,
            "|" + " --- |" * (head.count("|") - 1),
            *rows,
            "",
            "Rank correlation (Spearman) of what an audit measures with the KL of the next token, over these "
            f"{len(lines)} lines: {words}.",
            "",
            "![Recall against the keys that are used, a curve for each policy](pictures/audit-recall.svg)",
        ]
    )


if __name__ == "__main__":
    main()
