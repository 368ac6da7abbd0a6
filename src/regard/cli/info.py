"""Run `regard info`.

Paste its output into a bug or performance report.
"""

import argparse
import json
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard.machine import EXTRAS, Machine, describe_machine
from regard.show.terminal import escape_text, open_console, print_unpadded
from regard.weights.converted import clear_cache, describe_cache


def run(options: argparse.Namespace) -> int:
    """Describe the machine and print it, or remove the converted models."""
    if options.clear_cache:
        print(f"Removed: {describe_cache()}.")
        clear_cache()
        return 0
    machine = describe_machine(measure=not options.no_measure)
    if options.json:
        print(json.dumps(asdict(machine), allow_nan=False))
        return 0
    console = open_console()
    parts: list[RenderableType] = []
    for title, rows in list_sections(machine).items():
        parts += [Text(title, "bold"), tabulate(rows), ""]
    missing = [name for name, is_installed in machine.extras.items() if not is_installed]
    if missing:
        parts.append(Text(f'To install what is missing: pip install "regard[{",".join(missing)}]"'))
    print_unpadded(console, Group(*parts))
    return 0


def tabulate(rows: dict[str, str]) -> Table:
    """Return a table of labels and values, with long values wrapped."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows.items():
        table.add_row(Text(f"  {label}", "dim"), Text(escape_text(value)))
    return table


def list_sections(machine: Machine) -> dict[str, dict[str, str]]:
    """Return the sections of the report: the labels and values of each."""
    narrowed = ", narrowed by NUMBA_CPU_NAME or NUMBA_CPU_FEATURES" if machine.is_narrowed else ""
    about = {
        "processor": f"{machine.processor}, {machine.cores} core{'s' * (machine.cores != 1)}",
        "instructions": (" ".join(machine.instruction_sets) or "none that matter here") + narrowed,
        "torch uses": f"{machine.torch_capability}, {machine.threads} thread{'s' * (machine.threads != 1)}",
        "GPU": ", ".join(machine.accelerators) or "none",
        "system": machine.system,
    }
    if machine.bytes_per_second:
        about["memory"] = f"{machine.bytes_per_second / 1e9:.0f} GB/s, read by all threads"
        rates = machine.float32_per_second / 1e9, machine.bfloat16_per_second / 1e9
        about["products"] = "{:.0f} GFLOP/s in float32, {:.0f} in bfloat16 (torch.mm)".format(*rates)
    extras = {name: f"{'installed' if machine.extras[name] else 'missing'}: {use}" for name, (_, use) in EXTRAS.items()}
    cache = {".gguf files": describe_cache()}
    return {"Versions": machine.versions, "Machine": about, "Kernels": machine.kernels, "Cache": cache, "Extras": extras}
