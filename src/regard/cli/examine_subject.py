"""The subject of `regard examine`: an object in a file or a package, and the arguments of its class."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from regard.errors import ConfigError, DataError, RegardError
from regard.mechanism.arguments import add_article

NAME, KEYWORD = re.compile(r"(?P<place>.+):(?P<name>[^\W\d][\w.]*)"), re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


def find_object(target: str) -> Any:
    """Return the object that a target names."""
    named = NAME.fullmatch(target)
    if named is None:
        raise ConfigError(f"the target must be FILE.py:NAME or package.module:NAME, got {target!r}.")
    place, name = named["place"], named["name"]
    file = place.endswith(".py") or "/" in place or Path(place).is_file()
    value: Any = load_file(Path(place)) if file else import_named(place)
    for part in name.split("."):
        if not hasattr(value, part):
            known = [one for one, held in vars(value).items() if not one.startswith("_") and callable(held)]
            raise DataError(f"{place} has no {name}. It has {', '.join(known[:12]) or 'nothing that could be examined'}.")
        value = getattr(value, part)
    return value


def load_file(path: Path) -> ModuleType:
    """Run a file as a module, with its folder on sys.path, as Python runs a script."""
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is not a Python file: its name must end with .py.")
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # needed by dataclasses and pickle
    try:
        with explain_errors(f"{path} could not be run"):
            spec.loader.exec_module(module)
    finally:
        if hidden is not None:
            sys.modules[path.stem] = hidden
    return module


def import_named(name: str) -> ModuleType:
    """Import a module of an installed package, or of the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    with explain_errors(f"{name} could not be imported"):
        return importlib.import_module(name)


@contextlib.contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Convert any error of the subject's code within the context to a DataError of one line."""
    try:
        yield
    except RegardError:
        raise
    except BaseException as error:  # e.g. SystemExit
        line = next((str(text).strip() for text in str(error).splitlines() if text.strip()), "no message")
        raise DataError(f"{what}: {type(error).__name__}: {line}") from None


def make_subject(target: str, value: Any, arguments: Sequence[str] | None) -> Any:
    """Return the subject itself: an object as it is, an instance of a class, or what a function returns for given arguments."""
    if not isinstance(value, type) and arguments is None:
        return value
    if not callable(value) or isinstance(value, nn.Module):
        raise ConfigError(f"{target} is already an object, {add_article(type(value).__name__)}: leave out --args.")
    positional, named = parse_arguments(arguments or ())
    with explain_errors(
        f"{target}{show_signature(value)} could not be created with {' '.join(arguments or ()) or 'no --args'}"
    ):
        return value(*positional, **named)


def show_signature(value: Any) -> str:
    """Return the signature of a class or function; "" if it has none."""
    try:
        return str(inspect.signature(value)).partition(" ->")[0]
    except (TypeError, ValueError):
        return ""


def parse_arguments(arguments: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Parse --args into positional and keyword arguments."""
    positional, named = [], {}
    for text in arguments:
        keyword = KEYWORD.fullmatch(text)
        if keyword is None:
            positional.append(parse_literal(text))
        else:
            named[keyword[1]] = parse_literal(keyword[2])
    return positional, named


def parse_literal(text: str) -> Any:
    """Parse a Python literal; return the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
