"""`python -m benchmarks [NAME ...]`: run them, print tables, write results.json and docs/benchmarks.md.

Each processor, and each GPU, has its own section: a run on another machine adds one and leaves the others as they are.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.standings import summarize_standings
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
    "images",
    "attribution",
    "audit",
    "files",
    "long",
    "families",
    "packages",
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
OF_GPU = ("gpu_maps", "gpu_rules", "gpu_recording")
OF_KERNELS = ("kernels", "products")  # whose tables are followed by what was chosen
ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results.json"
BEGIN, END = "<!-- measured: written by make bench -->", "<!-- end of what make bench writes -->"


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in (*NAMES, *OF_GPU)]
    if unknown:
        raise SystemExit(f"expected names among {', '.join((*NAMES, *OF_GPU))}; got {', '.join(unknown)}")
    if not torch.cuda.is_available() and set(names) & set(OF_GPU):
        raise SystemExit(f"{', '.join(OF_GPU)} need a GPU, and torch finds none on this machine")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = names or [*NAMES, *(OF_GPU if torch.cuda.is_available() else ())]
    run_on_device([name for name in chosen if name in NAMES], results, machine.name_processor, describe_processor)
    run_on_device([name for name in chosen if name in OF_GPU], results, machine.name_gpu, lambda: (machine.describe_gpu(), {}))
    write_page(results)


def describe_processor() -> tuple[str, dict[torch.dtype, float]]:
    """The processor in a sentence, and its gigaflops."""
    peak = {dtype: machine.gigaflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    facts = f"{machine.describe()}. Products of large matrices: " + ", ".join(
        f"{value:.0f} GFLOP/s in {str(dtype)[6:]}" for dtype, value in peak.items()
    )
    return f"{facts}. Memory: read at {machine.gigabytes():.0f} GB/s", peak


def run_on_device(
    names: Sequence[str],
    results: dict[str, dict],
    name_section: Callable[[], str],
    describe: Callable[[], tuple[str, dict[torch.dtype, float]]],
) -> None:
    """Run benchmarks of a processor or of a GPU, and put each one's table into its section of the results at once."""
    if not names:
        return
    facts, peak = describe()
    print(f"{facts}\n{machine.list_kernels()}")
    own = results.setdefault(name_section(), {})
    for name in names:
        benchmark = import_module(f"benchmarks.{MODULES.get(name, name)}")  # with the packages that it alone compares
        print(f"\n{benchmark.TITLE}", flush=True)
        own[name] = {"machine": facts, "kernels": machine.list_kernels(), **asdict(benchmark.run(peak))}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # a long run that is stopped keeps what it has measured


def write_page(results: dict[str, dict]) -> None:
    """Put the tables between the two marks of the page: regard beside the fastest others, then a section for each processor."""
    parts = [summarize_standings(results)]
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
