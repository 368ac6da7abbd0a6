"""regard examine: is this attention right? A layer, a function or a whole model of a file or a package, with a report.

Exit code 1 where something was found.
"""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.cli import own_words
from regard.cli.progress import watched
from regard.errors import ConfigError, DataError, RegardError
from regard.examination import examine, models
from regard.examination.report import Report
from regard.mechanism import Mask
from regard.show.report import document
from regard.writing import whole

SEED = 123  # of weights and of a sample
NAME, KEYWORD = re.compile(r"(?P<place>.+):(?P<name>[^\W\d][\w.]*)"), re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
WARNING = "It runs the code of the file or package, as Python and pytest would: examine only what you would run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may stand after `regard examine`."""
    parser.epilog = WARNING
    parser.add_argument(
        "target",
        metavar="FILE.py:NAME",
        help="a class, an object or a function in a file, or package.module:NAME of what is installed",
    )
    parser.add_argument(
        "--args",
        nargs="*",
        metavar="VALUE",
        help="what the class is made with, or a function that makes the layer is called with, as in Python: 768 768 "
        "num_heads=12 bias=False; what is no value of Python is a text",
    )
    parser.add_argument(
        "--expects",
        metavar="RULE",
        default="causal",
        help="who may see whom: causal (the default), none (all see all), window:LEFT[,RIGHT], prefix:N, joined by & and |",
    )
    parser.add_argument(
        "--sample",
        metavar="SHAPE",
        help="the shape of an input, where it cannot be found: 2,6,768 for x, 2,3,6,64 for each of q, k and v",
    )
    parser.add_argument("--scale", metavar="S", type=float, help="what scores are multiplied by, where it is not 1 / √d")
    parser.add_argument("--offset", metavar="N", type=int, default=0, help="the position of the first query among the keys")
    parser.add_argument("--json", action="store_true", help="the whole report, for a program")
    parser.add_argument("--page", metavar="FILE", help="write the report with its picture as a page too: one .html file")


def run(options: argparse.Namespace) -> int:
    """Examines and prints. 0: nothing was found; 1: something was."""
    expects, sample = rule(options.expects), drawn(options.sample)
    if sys.stderr.isatty():
        print(f"regard examine: {WARNING}", file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        torch.manual_seed(SEED)
        subject = made(options.target, found(options.target), options.args)
        with counted(subject, sample):
            report: Report = examine(subject, expects=expects, sample=sample, scale=options.scale, offset=options.offset)
    if options.page is not None:
        kept(report, Path(options.page))
    print(json.dumps(report.json(), allow_nan=False) if options.json else report)
    return 0 if report.ok else 1


def kept(report: Report, path: Path) -> None:
    """Writes a report as a page; DataError where it cannot."""
    try:
        with whole(path) as (beside,):
            beside.write_text(document(report), encoding="utf-8")
    except OSError as error:
        raise DataError(f"--page {path}: {error.strerror or error}.") from None


def rule(text: str) -> Mask:
    """The rule of --expects."""
    try:
        return own_words.rule(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--mask", "--expects")) from None


def drawn(shape: str | None) -> Tensor | tuple[Tensor, ...] | None:
    """Seeded numbers in the shape of --sample: x, or q, k and v."""
    if shape is None:
        return None
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in shape.split(",")]
    if len(sizes) not in (2, 3, 4) or min(sizes) < 1:
        raise ConfigError(f"--sample is the shape of x, T,WIDTH or B,T,WIDTH, or of q, k and v, B,H,T,WIDTH; got {shape!r}.")
    draw = torch.Generator().manual_seed(SEED)
    tensors = tuple(torch.randn(sizes, generator=draw) for _ in range(3))
    return tensors if len(sizes) == 4 else tensors[0]


def found(target: str) -> Any:
    """The object that a target names."""
    named = NAME.fullmatch(target)
    if named is None:
        raise ConfigError(f"what is examined is FILE.py:NAME or package.module:NAME, got {target!r}.")
    place, name = named["place"], named["name"]
    file = place.endswith(".py") or "/" in place or Path(place).is_file()
    value: Any = loaded(Path(place)) if file else imported(place)
    for part in name.split("."):
        if not hasattr(value, part):
            known = [one for one, held in vars(value).items() if not one.startswith("_") and callable(held)]
            raise DataError(f"{place} has no {name}. It has {', '.join(known[:12]) or 'nothing that could be examined'}.")
        value = getattr(value, part)
    return value


def loaded(path: Path) -> ModuleType:
    """A file run as a module, with its folder on the path, as Python runs a program."""
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is no Python file: its name must end with .py.")
    module = importlib.util.module_from_spec(spec)
    hidden = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # what dataclasses and pickle look for
    try:
        with told(f"{path} could not be run"):
            spec.loader.exec_module(module)
    finally:
        if hidden is not None:
            sys.modules[path.stem] = hidden
    return module


def imported(name: str) -> ModuleType:
    """A module of an installed package, or of the folder that the command runs in."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    with told(f"{name} could not be imported"):
        return importlib.import_module(name)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """A context in which whatever somebody's code raises is one line."""
    try:
        yield
    except RegardError:
        raise
    except (Exception, SystemExit) as error:
        line = next((str(text).strip() for text in str(error).splitlines() if text.strip()), "it says nothing")
        raise DataError(f"{what}: {type(error).__name__}: {line}") from None


def made(target: str, value: Any, arguments: Sequence[str] | None) -> Any:
    """The layer itself: an object as it is, what a class makes, what a function gives where it is told what with."""
    if not isinstance(value, type) and arguments is None:
        return value
    if not callable(value) or isinstance(value, nn.Module):
        raise ConfigError(f"{target} is made already, a {type(value).__name__}: leave --args out.")
    positional, named = parsed(arguments or ())
    with told(f"{target}{signature(value)} could not be made with {' '.join(arguments or ()) or 'no --args'}"):
        return value(*positional, **named)


def signature(value: Any) -> str:
    """What a class or function takes, as it is written; nothing where it does not say."""
    try:
        return str(inspect.signature(value)).partition(" ->")[0]
    except (TypeError, ValueError):
        return ""


def parsed(arguments: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by place and by name."""
    positional, named = [], {}
    for text in arguments:
        keyword = KEYWORD.fullmatch(text)
        if keyword is None:
            positional.append(literal(text))
        else:
            named[keyword[1]] = literal(keyword[2])
    return positional, named


def literal(text: str) -> Any:
    """A value of Python, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextlib.contextmanager
def counted(subject: object, sample: object) -> Iterator[None]:
    """A context in which a bar counts how often a whole model has run; a layer is done before one would show."""
    if not isinstance(subject, nn.Module) or not sys.stderr.isatty() or not models.is_model(subject, sample):
        yield
        return
    runs: list[None] = []
    handle = subject.register_forward_hook(lambda *_: runs.append(None))
    try:
        with watched("examining", lambda: len(runs), models.FORWARDS):
            yield
    finally:
        handle.remove()
