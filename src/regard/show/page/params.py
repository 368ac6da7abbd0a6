"""Parameters of a request as numbers and names, or a one-sentence error."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from regard.errors import ConfigError, DataError
from regard.observe.recorded_runs.run import KINDS
from regard.show.page.recording_entry import HeadPlace

INTEGER = re.compile(r"[0-9]{1,9}")
INTEGER_LIST = re.compile(r"[0-9]{1,4}(,[0-9]{1,4}){0,255}")
HEAD_LIST = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}(,[0-9]{1,4}\.[0-9]{1,4}){0,4095}")
NAME = re.compile(r"[\w .:/-]{1,200}")
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100
MAX_NAMES = 32
MAX_QUOTED = 40  # letters of a value quoted in an error


class MissingError(ConfigError):
    """The requested object does not exist."""


def check_unique(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the parameters of a request. Raises ConfigError where one is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{quote_value(twice)} must be given once, got it {names.count(twice)} times.")
    return found


def parse_integer(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Parse a whole number of at least 0. Raises ConfigError where it is none."""
    came = query.get(name)
    if came is None and default is not None:
        return default
    if came is None or not INTEGER.fullmatch(came):
        raise ConfigError(f"{name} must be a whole number of at least 0, got {quote_value(came)}.")
    return int(came)


def parse_integers(query: Mapping[str, str], name: str) -> list[int]:
    """Parse whole numbers separated by commas; return an empty list where the parameter is missing."""
    came = query.get(name) or ""
    if came and not INTEGER_LIST.fullmatch(came):
        raise ConfigError(f"{name} must be whole numbers separated by commas, got {quote_value(came)}.")
    return [int(one) for one in came.split(",") if one]


def parse_name(query: Mapping[str, str], name: str, default: str | None = None) -> str:
    """Parse a name. Raises ConfigError where it is none."""
    came = query.get(name) or default
    if came is None or not NAME.fullmatch(came):
        raise ConfigError(f"{name} must be a name, got {quote_value(came)}.")
    return came


def parse_names(query: Mapping[str, str], name: str) -> list[str]:
    """Parse names separated by commas. Raises ConfigError where one is none, or where there are too many."""
    found = [parse_name({name: one}, name) for one in (query.get(name) or "").split(",")]
    if len(found) > MAX_NAMES:
        raise ConfigError(f"{name} must be at most {MAX_NAMES} names, got {len(found)}.")
    return found


def parse_choice(query: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Parse one of some names. Raises ConfigError where it is none of them."""
    came = query.get(name)
    if came is None or came not in choices:
        raise ConfigError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {quote_value(came)}.")
    return came


def parse_place(query: Mapping[str, str]) -> HeadPlace:
    """Parse a place in a recording."""
    kind = parse_name(query, "kind", "self")
    if kind not in KINDS:
        raise ConfigError(f"kind must be self or cross, got {quote_value(kind)}.")
    part = parse_name(query, "part") if query.get("part") else None
    return HeadPlace(
        kind, part, parse_integer(query, "b", 0), parse_integer(query, "layer", 0), parse_integer(query, "head", 0)
    )


def parse_heads(query: Mapping[str, str], name: str) -> list[HeadPlace]:
    """Parse heads LAYER.HEAD separated by commas, at least one. Raises ConfigError where they are none."""
    came = query.get(name)
    if came is None or not HEAD_LIST.fullmatch(came):
        raise ConfigError(f"{name} must be heads such as 3.1,3.4, layer and head, got {quote_value(came)}.")
    pairs = dict.fromkeys(tuple(map(int, one.split("."))) for one in came.split(","))
    return [HeadPlace(layer=layer, head=head) for layer, head in pairs]


def parse_json(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a request. Raises DataError where it is none."""
    try:
        found = json.loads(data, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        raise DataError("the request must be one JSON object in UTF-8, but it could not be parsed.") from None
    if not isinstance(found, dict):
        raise DataError(f"the request must be a JSON object, got {type(found).__name__}.")
    return found


def parse_body(data: bytes, expected: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Parse the expected members of the JSON object of a request. Raises DataError where one has another type."""
    found = parse_json(data)
    for name, kind in expected.items():
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise DataError(f"{quote_value(name)} must be of type {names}, got {quote_value(json.dumps(value))}.")
    return {name: found[name] for name in expected}


def parse_optional(data: bytes, name: str, kind: type) -> Any:
    """Parse a member of the JSON object of a request that may be missing; return None where it is."""
    return None if parse_json(data).get(name) is None else parse_body(data, {name: kind})[name]


def check_temperature(came: float) -> float:
    """Check the sampling temperature: 0, or a number from 0.01 to 100, by which logits can still be divided."""
    if came != 0 and not MIN_TEMPERATURE <= came <= MAX_TEMPERATURE:
        raise ConfigError(
            f"temperature must be 0, or at least {MIN_TEMPERATURE} and at most {MAX_TEMPERATURE}, got {quote_value(str(came))}."
        )
    return float(came)


def reject_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and the infinities, which are not JSON."""
    raise ValueError(constant)


def quote_value(came: str | None) -> str:
    """Quote a received value for an error message."""
    if came is None:
        return "nothing"
    return repr(came if len(came) <= MAX_QUOTED else came[:MAX_QUOTED] + "…")
