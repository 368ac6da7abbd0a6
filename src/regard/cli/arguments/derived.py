"""The flags that correspond to fields of a Python class; `python -m docs.flags` writes them into derived.json."""

import argparse
import json
from functools import cache

TYPE_CHECKING = False  # as in typing, whose import takes as long as Python's own start
if TYPE_CHECKING:
    from typing import Any

FILE = __file__.removesuffix(".py") + ".json"


@cache
def read_flags_file() -> "dict[str, Any]":
    """Read the flags of each command."""
    with open(FILE, encoding="utf-8") as file:  # pathlib alone takes a tenth of the time of --help
        found: dict[str, Any] = json.load(file)
    return found


def read_flags(command: str) -> "Any":
    """Return the content of the file for a command."""
    return read_flags_file()[command]


def add_flag(parser: argparse._ActionsContainer, name: str, kind: str, default: "Any", says: str) -> None:
    """Add the flag of a field; if it is not given, the options have no such attribute."""
    flag, known = f"--{name.replace('_', '-')}", {"default": argparse.SUPPRESS, "dest": name}
    shown = f"({', '.join(map(str, default))})" if kind == "floats" else default
    help_text = (f"{says} ({shown})" if default not in ("", None) else says).replace("%", "%%")
    if kind == "bool":
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=says, **known)  # type: ignore[arg-type]
    elif kind == "floats":
        parser.add_argument(flag, nargs=2, type=float, metavar="X", help=help_text, **known)  # type: ignore[arg-type]
    elif kind == "strings":
        help_text = f"{says} ({' '.join(default)})" if default else says
        parser.add_argument(flag, nargs="+", metavar="NAME", help=help_text, **known)  # type: ignore[arg-type]
    else:
        metavar = {"int": "N", "float": "X"}.get(kind, "WORDS" if name in ("prompt", "observe_text") else "NAME")
        types = {"int": int, "float": float, "str": str}
        parser.add_argument(flag, type=types[kind], metavar=metavar, help=help_text, **known)  # type: ignore[arg-type]
