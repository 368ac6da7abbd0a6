"""`python -m benchmarks [NAME ...]`: runs them, prints tables, writes results.json and docs/benchmarks.md."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import (
    examining,
    families,
    generation,
    kernels,
    layers,
    lineage,
    long_text,
    machine,
    maps,
    observing,
    page,
    products,
    recording,
    rounding,
    rules,
    scaling,
    training,
    tried,
)
from benchmarks.tables import Table

BENCHMARKS = {
    "kernels": kernels,
    "rules": rules,
    "layers": layers,
    "tried": tried,
    "maps": maps,
    "recording": recording,
    "long": long_text,
    "families": families,
    "products": products,
    "generation": generation,
    "rounding": rounding,
    "training": training,
    "page": page,
    "scaling": scaling,
    "observing": observing,
    "lineage": lineage,
    "examining": examining,
}
ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results.json"
BEGIN, END = "<!-- measured: written by make bench -->", "<!-- end of what make bench writes -->"


def main(names: list[str]) -> None:
    peak = {dtype: machine.gigaflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    facts = f"{machine.describe()}. Products of large matrices: " + ", ".join(
        f"{value:.0f} GFLOP/s in {str(dtype)[6:]}" for dtype, value in peak.items()
    )
    print(facts)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or BENCHMARKS:
        print(f"\n{BENCHMARKS[name].TITLE}", flush=True)
        results[name] = {"machine": facts, **asdict(BENCHMARKS[name].run(peak))}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)


def write_page(results: dict[str, dict]) -> None:
    """Puts the tables between the two marks of the page."""
    parts = []
    for result in results.values():
        table = Table(result["title"], result["columns"], result["rows"])
        parts.append(f"{table.markdown()}\n\nMeasured on {result['machine']}.")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
