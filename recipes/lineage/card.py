"""The card of a translator that is carried: what it is made of, how near it is to people's, and what it cannot do."""

from collections.abc import Sequence
from pathlib import Path

from recipes.lineage.runs import HERE, Run, seconds
from recipes.lineage.table import BEAMS, DRAWS, EDGES, by_length, within
from recipes.lineage.table import said as scored
from regard.evaluate.translation_scores import bleu, chrf, translate_sentences
from regard.models import translator
from regard.models.translator import Translator
from regard.text.pairs import Pairs

SHOWN = 10  # translations
OWN = ("A man is riding a horse.", "The cat that was sitting on the mat, which was next to the dog, jumped.")
IS = {
    "additive": "with additive attention (Bahdanau et al. 2014): before each word it looks back at every word of the sentence",
    "plain": "without attention (Cho et al. 2014): all that it knows of the sentence while it writes is one vector",
}
CANNOT = {
    "additive": "It was made to be looked at, and is small.",
    "plain": "It was made to be held against the one with attention: of a long sentence little is left in one vector.",
}
CARD = """\
# {title}

A recurrent translator of {parameters:,} parameters, English to French,
{what}.
{use}

- **Data**: {pairs:,} sentence pairs. Captions of photographs from Multi30k (Elliott et al. 2016, 2017; given for research), and
  sentences from Tatoeba (CC BY 2.0; attribution: www.manythings.org/anki and tatoeba.org). {test:,} more were kept for the end.
- **Licence**: that of regard, MIT. The captions are given for research: who wants more of what was learned from them looks at
  their terms first.
- **Vocabulary**: {vocabulary:,} pieces for both languages, learned from the training part.
- **Made by** `python -m recipes.lineage --data FOLDER --only {run}`, in {hours:.1f} hours of training, seed {seed}; and
  `python -m recipes.lineage --carry`, which stores its matrices in int8 and wrote this card.

## How near it is to people's

Of the file that lies here, on sentences that were not trained on.

{scores}

{signatures}

BLEU against the words of the sentence, both sets together, {beams} beams:

{lengths}

## What it cannot do

{cannot}

It has seen captions and short everyday sentences and nothing else, and writes something likely where it does not know a word.
It translates a sentence at a time, without what stood before it, and does not say how sure it is. The table above tells how far
it gets as sentences grow. Nobody should depend on what it says.

## {count} sentences

By the likeliest word each time. The first {own} are ours, the others Tatoeba's, not chosen: one of each {every} that were kept
for the end.

{samples}

## Config

```toml
{config}
```
"""


def of(name: str, run: Run, folder: Path, root: Path) -> str:
    """The card of a run's model, measured of what lies in this folder."""
    model, pairs = translator.load(folder), Pairs.load(root / run.pairs)
    captions = {*Pairs.load(root / "multi30k").test.decode_sentences("source")}
    asked, right = (pairs.test.decode_sentences(side) for side in ("source", "target"))
    sets = {
        "Multi30k, test_2016_flickr": [n for n, one in enumerate(asked) if one in captions],
        "Tatoeba": [n for n, one in enumerate(asked) if one not in captions],
    }
    written = {beams: list(translate_sentences(model, asked, beams=beams)) for beams in BEAMS}
    lines, signatures = measured(sets, written, right)
    every = max(len(sets["Tatoeba"]) // SHOWN, 1)
    chosen = sets["Tatoeba"][::every][:SHOWN]
    return CARD.format(
        title=f"The {name.replace('-plain', ' without attention')}",
        what=IS[run.model],
        use=used(name),
        parameters=sum(weight.numel() for weight in model.parameters()),
        pairs=len(pairs.train),
        test=len(pairs.test),
        vocabulary=model.sizes["vocabulary"],
        run=run.name,
        hours=seconds(run, root) / 3600,
        seed=run.seed,
        scores=lines,
        signatures="\n".join(signatures),
        beams=BEAMS[-1],
        lengths=lengths(asked, written[BEAMS[-1]], right),
        cannot=CANNOT[run.model],
        count=len(OWN) + len(chosen),
        own=len(OWN),
        every=every,
        samples=samples(model, [asked[n] for n in chosen], [right[n] for n in chosen]),
        config=(HERE / f"{run.model}.toml").read_text(encoding="utf-8").partition("\n")[2].strip(),  # not what it is called
    )


def used(name: str) -> str:
    """How it is called."""
    flag = "" if name == "translator" else f" --model {name}"
    return f'`regard translate "{OWN[0]}"{flag}`; in Python `regard.models.translator.load("{name}")`.'


def measured(sets: dict[str, list[int]], written: dict[int, list[str]], references: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The scores as a table, a line for each set that is not empty, and their signatures."""
    lines = ["| | sentences | BLEU, greedy | BLEU, 4 beams | chrF, 4 beams |", "|---|---|---|---|---|"]
    signatures: dict[str, None] = {}
    for name, places in sets.items():
        if not places:
            continue
        greedy, searched, right = ([texts[n] for n in places] for texts in (*written.values(), references))
        scores = [score(found, right, DRAWS) for score, found in ((bleu, greedy), (bleu, searched), (chrf, searched))]
        lines.append(f"| {name} | {len(places):,} | {' | '.join(within(scored(one)) for one in scores)} |")
        signatures |= dict.fromkeys(f"`{one.name}|{one.signature}`" for one in scores)
    return "\n".join(lines), list(signatures)


def lengths(asked: Sequence[str], written: Sequence[str], references: Sequence[str]) -> str:
    """BLEU of each bin of lengths as a table."""
    found = by_length(asked, written, references)
    words = [f"over {one['above']}" if one["upto"] >= EDGES[-1] else f"{one['above'] + 1} to {one['upto']}" for one in found]
    rows = {"words": words, "sentences": [f"{one['sentences']:,}" for one in found], "BLEU": [within(one) for one in found]}
    first, *others = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([first, "|---" * (len(found) + 1) + "|", *others])


def samples(model: Translator, sentences: Sequence[str], references: Sequence[str]) -> str:
    """Sentences, what the model makes of them, and where somebody has translated them, that."""
    lines = ["| English | its French | a person's |", "|---|---|---|"]
    found = list(translate_sentences(model, [*OWN, *sentences]))
    for cells in zip([*OWN, *sentences], found, ["", "", *references], strict=True):
        lines.append(f"| {' | '.join(cell.replace('|', ' ') for cell in cells)} |")
    return "\n".join(lines)
