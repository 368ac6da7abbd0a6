"""Read JSON files that describe weights as objects, within limits, with clear errors."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import WeightsError

LARGEST = 1 << 26  # bytes; the index of a model of 600 layers takes less than a megabyte
SHOWN = reprlib.Repr()  # bounded in depth, unlike repr
SHOWN.maxlevel, SHOWN.maxdict, SHOWN.maxlist = 3, 4, 6
SHOWN.maxstring = SHOWN.maxlong = SHOWN.maxother = 60


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raise WeightsError if it contains anything else or cannot be read."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON: {error}.") from None
    except RecursionError:
        raise WeightsError(f"{path} cannot be read as JSON: its objects are nested too deeply.") from None
    if not isinstance(content, dict):
        raise WeightsError(f"{path} must be a JSON object, got {show_value(content)}.")
    return content


def read_weight_map(index: Path) -> dict[str, str]:
    """Read which file holds which tensor from the index of several files; raise WeightsError if it is invalid."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise WeightsError(f'{index} must have "weight_map", an object that maps tensors to files; got {show_value(places)}.')
    for name, file in places.items():
        if not isinstance(file, str):
            raise WeightsError(f"{index} must name the file of {name}, got {show_value(file)}.")
    return places


def show_value(value: object) -> str:
    """Return the repr of a value, shortened if it is long or deep."""
    return SHOWN.repr(value)


def show_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as name=value, each of them shortened."""
    return ", ".join(f"{name}={show_value(value)}" for name, value in settings.items())
