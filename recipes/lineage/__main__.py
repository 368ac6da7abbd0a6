"""python -m recipes.lineage --data FOLDER: from an RNN to the Transformer. Whatever is done already is left as it is.

FOLDER holds multi30k, a folder of train.en, train.fr, val.en and so on, and tatoeba/fra-eng.zip. What is made lies in
runs/lineage: the pairs as tokens, a folder a run, and of all runs that are done table.json and table.md.
"""

import argparse
from pathlib import Path

from recipes.lineage import carry, measure, page, runs, table

ROOT = Path("runs/lineage")


def main() -> None:
    """Pairs, training, table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.lineage", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder of multi30k and tatoeba")
    parser.add_argument("--only", metavar="NAME", help="runs whose name begins so: multi30k-plain-0, joined, ...")
    parser.add_argument("--list", action="store_true", help="the names of the runs, and which are done")
    parser.add_argument("--out", type=Path, default=ROOT, help=f"where it lies ({ROOT})")
    parser.add_argument("--trial", metavar="N", type=int, default=0, help="N pairs and six steps of each, to see it work")
    parser.add_argument("--carry", action="store_true", help="put two trained models into the package, with cards; no more")
    parser.add_argument(
        "--measure", action="store_true", help="measure the runs that are done and write docs/lineage.md; no more"
    )
    options = parser.parse_args()
    if options.trial and options.out == ROOT:
        options.out = ROOT / "trial"  # whose runs are no beginning of the real ones
    asked = [one for one in runs.runs() if one.name.startswith(options.only or "")]
    if not asked:
        parser.error(f"no run begins with {options.only}: {', '.join(one.name for one in runs.runs())}")
    if options.list:
        for one in asked:
            print(f"{one.name:<32}{'done' if runs.done(one, options.out) else ''}")
        return
    if options.carry:
        carry.write(options.out)
        return
    if options.measure:
        measure.measured(options.out)
        page.write()
        return
    if options.data is None:
        parser.error("--data is needed: the folder of multi30k and tatoeba")
    for one in asked:
        corpus = runs.prepared(one.pairs, options.data, options.out, options.trial)
        runs.train(one, corpus, options.out, bool(options.trial))
        table.evaluated(one, corpus, options.out)
    every = [one for one in runs.runs() if (options.out / one.name / "table.json").is_file()]
    table.write([table.evaluated(one, Path(), options.out) for one in every], options.out)


if __name__ == "__main__":
    main()
