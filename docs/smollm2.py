"""python -m docs.smollm2: what the heads of SmolLM2-135M-Instruct do, on probes and on a text, into docs/smollm2.md.

Needs --model smollm2 (see docs/heads.md) and Tiny Shakespeare, which lies beside the repository where its tests find it.
"""

import random
import statistics
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.cli.arguments.look import SMOLLM2
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.observe.classification.head_kinds import RETRIEVAL, RETRIEVED
from regard.observe.head_table import Head, Heads, describe_interval
from regard.observe.score_interval import Score, estimate_score
from regard.probe.repeated_tokens import Probe, make_probe_of_model
from regard.probe.retrieval import LENGTH, make_needle_prompts, measure_retrieval
from regard.probe.succession import make_successions, measure_succession

ROOT = Path(__file__).parents[1]
TEXT = ROOT.parent / "shared" / "data" / "text" / "tinyshakespeare.txt"
PAGE = ROOT / "docs" / "smollm2.md"
DOCUMENTS, TOKENS = 8, 256  # of the text: parts of it, each read by itself
DRAWS = 10  # sets of random heads
MOST_ROWS = 8  # heads of a kind
MOST_SUCCEEDING = 5
PAGE_TEXT = """\
# The heads of SmolLM2

What the {count} heads of SmolLM2-135M-Instruct (30 layers of 9 heads, Q4_1) do, as
`regard heads --model smollm2 --haystack tinyshakespeare.txt` describes them. `python -m docs.smollm2` writes this page.

## On repeated random tokens

{probe}
{named} of {count} heads have a kind: the interval of one score lies above its threshold, and of no other as clearly. The others
are unclear; of each, `regard heads` lists the largest scores.

{kinds}

Induction heads are named where they match prefixes and copy. {matching} heads have a prefix matching score above 0.4, as Olsson
et al. 2022 measure it; {copying} of them raise the logit of the token that they attend to. What is lost without a head is
measured with the mean of other rows in its place.

{tables}

## Without the induction heads

The loss on the repeated tokens, in nats, {rows} rows, with the mean of other rows in place of the heads:

| replaced | loss | rises by |
| --- | --- | --- |
{ablations}

## Retrieval

{retrieval}

{retrieving}

## Succession

The share of {steps} steps of sequences (days, months, numbers, ordinals, letters) at which a head, attending to a word, raises
the next one above all others of its sequence; by chance about one in {chance:.0f}. The five highest:

{succeeding}

## On a text

Tiny Shakespeare, {documents} parts of {tokens} tokens, each read by itself; the intervals are over the parts. Without
repeated tokens little distinguishes induction heads from duplicate token heads, and more heads rest on the first token.
[Over many documents](smollm2_atlas.md), an atlas says what they do there.

{text_kinds}
"""


def main() -> None:
    """Measure and write the page."""
    foreign = load_model(SMOLLM2, CAUSAL_LM)
    text = TEXT.read_text(encoding="utf-8")
    table = regard.probe_heads(foreign.model)
    prompts = make_needle_prompts(foreign, text, length=LENGTH)
    scores, answered = measure_retrieval(foreign.model, prompts)
    successions = make_successions(foreign)
    succession = measure_succession(foreign.model, successions)
    retrieving = sorted((place for place, score in scores.items() if score.low > RETRIEVED), key=lambda place: -scores[place])
    kinds = Counter(row.kind for row in table)
    probe = make_probe_of_model(foreign.model, foreign.model.config.vocab_size)
    matching = [row for row in table if row.scores["induction"] > 0.4]
    by_place = {(row.layer, row.head): row for row in table}
    PAGE.write_text(
        PAGE_TEXT.format(
            count=len(table),
            probe=table.notes[0],
            named=len(table) - kinds["unclear"],
            kinds=format_kinds(kinds),
            matching=len(matching),
            copying=sum(row.scores["copying"].low > 0 for row in matching),
            tables="\n\n".join(format_kind(table, kind) for kind in ("induction", "previous token", "duplicate", "itself")),
            rows=len(probe.tokens),
            ablations="\n".join(compare_ablations(foreign, probe, table)),
            retrieval=(
                f"Three sentences, each inserted at five depths of {LENGTH} tokens of Tiny Shakespeare, and a question on it; "
                f"the model\nanswered {answered} of {len(prompts)}. {len(retrieving)} heads have a score whose interval lies "
                "above 0.1 (Wu et al. 2024):"
            ),
            retrieving="\n".join(
                [
                    "| head | retrieval score | kind on repeated tokens | prefix matching |",
                    "| --- | --- | --- | --- |",
                    *(
                        f"| {layer}.{head} | {describe_interval(scores[layer, head])} | {by_place[layer, head].kind} | "
                        f"{by_place[layer, head].scores['induction']:.2f} |"
                        for layer, head in retrieving
                    ),
                ]
            ),
            steps=len(successions),
            chance=statistics.harmonic_mean([len(step.sequence) for step in successions]),
            succeeding=format_succession(succession),
            documents=DOCUMENTS,
            tokens=TOKENS,
            text_kinds=format_kinds(Counter(row.kind for row in read_text(foreign, text))),
        ),
        encoding="utf-8",
    )
    print(f"written: {PAGE}; {RETRIEVAL}: {len(retrieving)} heads")


def format_succession(scores: dict[tuple[int, int], Score]) -> str:
    """Return a table of the heads with the highest scores."""
    best = sorted(scores, key=lambda place: -scores[place])[:MOST_SUCCEEDING]
    lines = [f"| {layer}.{head} | {describe_interval(scores[layer, head])} |" for layer, head in best]
    return "\n".join(["| head | succession score |", "| --- | --- |", *lines])


def format_kinds(kinds: Counter[str]) -> str:
    """Return how many heads have each kind."""
    lines = [f"| {kind} | {count} |" for kind, count in kinds.most_common()]
    return "\n".join(["| kind | heads |", "| --- | --- |", *lines])


def format_kind(table: Heads, kind: str) -> str:
    """Return a table of the clearest heads of a kind."""
    rows = table.select_kind(kind).sort_by(kind)
    columns = (kind, "copying", "ov", "effect") if kind == "induction" else (kind, "effect")
    shown = rows.rows[:MOST_ROWS]
    more = f", the {len(shown)} clearest" if len(rows) > len(shown) else ""
    title = f"**{kind}**: {len(rows)} head{'s' * (len(rows) != 1)}{more}"
    lines = [f"| {row.layer}.{row.head} | {' | '.join(format_cell(row, name) for name in columns)} |" for row in shown]
    return "\n".join([title, "", f"| head | {' | '.join(columns)} |", f"| {'--- | ' * (len(columns) + 1)}".rstrip(), *lines])


def format_cell(row: Head, name: str) -> str:
    """Return a score with its interval; without for the eigenvalue score, which has none."""
    score = row.scores[name]
    return f"{score:.2f}" if name == "ov" else describe_interval(score)


@torch.no_grad()
def compare_ablations(foreign: TextModel, probe: Probe, table: Heads) -> list[str]:
    """Return rows of the loss with all heads, without the induction heads, and without as many random heads of other kinds."""
    named = [(row.layer, row.head) for row in table.select_kind("induction")]
    others = [(row.layer, row.head) for row in table if (row.layer, row.head) not in named]
    whole = measure_losses(foreign, probe, [])
    without = measure_losses(foreign, probe, named)
    rise = estimate_score((without - whole).tolist(), [], 0)
    draws = [measure_losses(foreign, probe, random.Random(n).sample(others, len(named))) - whole for n in range(DRAWS)]
    rises = [float(draw.mean()) for draw in draws]
    return [
        f"| nothing | {whole.mean():.2f} | |",
        f"| the {len(named)} induction heads | {without.mean():.2f} | {describe_interval(rise)} |",
        f"| {len(named)} random other heads, {DRAWS} draws | {whole.mean() + statistics.mean(rises):.2f} | "
        f"{statistics.mean(rises):.2f}, from {min(rises):.2f} to {max(rises):.2f} |",
    ]


def measure_losses(foreign: TextModel, probe: Probe, heads: list[tuple[int, int]]) -> Tensor:
    """Return the mean loss of each row of the probe without these heads."""
    with regard.intervene(foreign.model, *(regard.KnockOut(layer, head, by="mean") for layer, head in heads)):
        logits = foreign.model(probe.tokens).logits
    following = probe.tokens[:, probe.repeated.start + 1 : probe.repeated.stop + 1]
    return F.cross_entropy(logits[:, probe.repeated].transpose(1, 2), following, reduction="none").double().mean(1)


@torch.no_grad()
def read_text(foreign: TextModel, text: str) -> Heads:
    """Return the kinds of the heads on parts of a text."""
    ids = torch.tensor(foreign.encode(text)[: DOCUMENTS * TOKENS]).view(DOCUMENTS, TOKENS)
    with regard.record(foreign.model) as recording:
        foreign.model(ids)
    return regard.heads(recording, tokens=ids, classes={})


if __name__ == "__main__":
    main()
