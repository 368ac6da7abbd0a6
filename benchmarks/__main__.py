"""`python -m benchmarks [NAME ...]`: run them, print tables, write results.json and docs/benchmarks.md.

Each processor has its own section: a run on another machine adds one and leaves the others as they are.
"""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.tables import Table

MODULES = {"long": "long_text"}  # a benchmark whose module has another name
NAMES = (
    "kernels",
    "rules",
    "layers",
    "mkl_override",
    "tried",
    "maps",
    "head_scores",
    "windows",
    "recording",
    "handwritten",
    "attribution",
    "audit",
    "files",
    "long",
    "families",
    "coverage",
    "products",
    "tiles",
    "loops",
    "generation",
    "decoders",
    "startup",
    "rounding",
    "training",
    "page",
    "scaling",
    "observing",
    "atlas",
    "edges",
    "lineage",
    "examining",
    "scans",  # last: JAX starts threads, and others fork
)
OF_KERNELS = ("kernels", "products")  # whose tables are followed by what was chosen
ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results.json"
BEGIN, END = "<!-- measured: written by make bench -->", "<!-- end of what make bench writes -->"


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SystemExit(f"expected names among {', '.join(NAMES)}; got {', '.join(unknown)}")
    peak = {dtype: machine.gigaflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    facts = f"{machine.describe()}. Products of large matrices: " + ", ".join(
        f"{value:.0f} GFLOP/s in {str(dtype)[6:]}" for dtype, value in peak.items()
    )
    facts += f". Memory: read at {machine.gigabytes():.0f} GB/s"
    print(f"{facts}\n{machine.list_kernels()}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    own = results.setdefault(machine.name_processor(), {})
    for name in names or NAMES:
        benchmark = import_module(f"benchmarks.{MODULES.get(name, name)}")  # with the packages that it alone compares
        print(f"\n{benchmark.TITLE}", flush=True)
        own[name] = {"machine": facts, "kernels": machine.list_kernels(), **asdict(benchmark.run(peak))}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # a long run that is stopped keeps what it has measured
    write_page(results)


def write_page(results: dict[str, dict]) -> None:
    """Put the tables between the two marks of the page, a section for each processor."""
    parts = []
    for name, own in results.items():
        parts.append(f"## {name}")
        for benchmark, result in own.items():
            table = Table(result["title"], result["columns"], result["rows"])
            kernels = f" Kernels: {result['kernels']}." if benchmark in OF_KERNELS and result.get("kernels") else ""
            parts.append(f"{table.markdown()}\n\nMeasured on {result['machine']}.{kernels}")
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
