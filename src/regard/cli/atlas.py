"""Run `regard atlas`.

Exit code 2 if the model, the corpus or the settings cannot be used, or if the folder holds another atlas.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.text import Text

from regard.cli.model_loading import CAUSAL_LM, load_model
from regard.cli.progress_bar import iterate_with_bar
from regard.errors import ConfigError
from regard.head_atlas.build_atlas import atlas, check_sizes, merge_atlas
from regard.observe.head_table import Heads
from regard.show.head_summary import render_kinds, render_sentences, select_clearest
from regard.show.number_format import format_count
from regard.show.terminal import open_console, print_lines, print_wrapped

SETTINGS = ("documents", "tokens", "queries", "examples", "shard_size", "engine")


def run(options: argparse.Namespace) -> int:
    """Build or merge an atlas and print its heads."""
    given = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if options.action == "merge":
        if given or options.model or options.on or options.shard:
            raise ConfigError("regard atlas merge takes --out, the folder with the shards, and nothing else.")
        table: Heads | None = merge_atlas(options.out)
    elif not options.model or not options.on:
        raise ConfigError("pass --model, the name of a model, and --on, the texts.")
    else:
        table = build_atlas(options, given)
    if options.json:
        print(json.dumps(None if table is None else table.to_dicts(), allow_nan=False))
    elif table is None:
        sentence = f"The shards {options.shard} are computed. The last of the others, or regard atlas merge, writes the result."
        print_wrapped(open_console(), Text(sentence))
    else:
        print_atlas(table, Path(options.out))
    return 0


def build_atlas(options: argparse.Namespace, given: dict[str, Any]) -> Heads | None:
    """Build the atlas of a model."""
    if not Path(options.on).exists():
        raise ConfigError(f"--on is the path of a text or of a folder of texts; there is no {options.on}.")
    shard = None if options.shard is None else parse_shard(options.shard)
    check_sizes(**{name: value for name, value in given.items() if name != "engine"})
    foreign = load_model(options.model, CAUSAL_LM)
    return atlas(
        foreign,
        Path(options.on),
        options.out,
        shard=shard,
        watch=lambda shards, count: iterate_with_bar("shards", shards, count),
        **given,
    )


def parse_shard(text: str) -> tuple[int, int]:
    """Return I and N of "I/N". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--shard is I/N with I from 0 to N - 1, such as 0/4; got {text}.")
    return int(found[1]), int(found[2])


def print_atlas(table: Heads, folder: Path) -> None:
    """Print the kinds of the heads, the clearest heads, and where the pages are."""
    console = open_console()
    print_wrapped(console, Text(f"{format_count(len(table), 'head')}. {table.notes[0]}", style="bold"))
    print_lines(console, render_kinds(table, console.width))
    print_lines(console, [Text(), *render_sentences(select_clearest(table), console.width)])
    print_wrapped(console, Text(f"\nPages: {folder / 'site' / 'index.html'}. Tables: {folder / '*.parquet'}."))
