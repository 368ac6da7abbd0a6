"""What `regard walk` shows of the lectures' examples: `python -m docs.screens` writes it into regard/cli/walk_screens.json.

`regard walk` prints it from there, because computing it imports PyTorch.
"""

import json
from dataclasses import fields
from typing import Any

from regard.atomic_write import write_atomically
from regard.cli.walk_example import convert_step, make_screen
from regard.cli.walk_screen import FILE
from regard.lectures.examples import EXAMPLES, build_example, summarize_example
from regard.show.step_descriptions import describe_example


def derive() -> dict[str, Any]:
    """The summary and the screen of each example, as JSON holds them."""
    found = {}
    for name in EXAMPLES:
        chosen = build_example(name)
        screen = make_screen(chosen, describe_example(chosen))
        shown = {one.name: getattr(screen, one.name) for one in fields(screen)} | {
            "steps": [convert_step(one) for one in screen.steps]
        }
        found[name] = {"summary": summarize_example(name), "screen": shown}
    return json.loads(json.dumps(found))


def main() -> None:
    """Write the file."""
    with write_atomically(FILE) as (beside,):
        beside.write_text(json.dumps(derive(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
