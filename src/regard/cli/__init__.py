"""The command line: one module per command, which parses options, calls the library and prints; the flags are in arguments/."""

import argparse
import errno
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import groupby

import regard
from regard.cli.arguments import COMMANDS
from regard.errors import RegardError, shorten_message
from regard.terminal_escapes import LINES, EscapingStream, ReaderGoneError, escape_controls

TYPE_CHECKING = False  # as in typing, whose import takes as long as Python's own start
if TYPE_CHECKING:
    from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error in one line."""

    def error(self, message: str) -> "NoReturn":
        self.exit(2, f"{self.prog}: {shorten_message(message)} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: "Any" = None) -> None:  # argparse's own method ignores a full disk
        (file or sys.stderr).write(message)


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps each paragraph of a text by itself, and each line that is indented below its second column.

    The lines of the usage are indented less where the terminal is narrow.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_table, some in groupby(text.strip("\n").splitlines(), lambda line: not line or line[0] == " "):
            for line in some if is_table else (" ".join(some),):
                first = re.match(r" +\S.*?  +", line)
                column = min(first.end(), width // 2) if first else 0
                lines += textwrap.wrap(line, width, subsequent_indent=" " * column) or [""]
        return "\n".join(lines)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"  # both on one line are wider than a narrow screen
        return super()._format_action_invocation(action)

    def _format_usage(self, *parts: "Any") -> str:
        usage = re.sub(r"--([\w-]+) \| --no-\1", r"--[no-]\1", super()._format_usage(*parts))
        if all(len(line) <= self._width for line in usage.splitlines()):
            return usage
        return re.sub(r"^ +", "  ", usage, flags=re.MULTILINE)  # argparse indents each line below the end of the command's name


def open_closed_streams() -> None:
    """Open /dev/null for streams that were closed before Python started (`>&-`), whose handle another file would get."""
    for handle, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), handle)
            os.set_inheritable(handle, True)
            setattr(sys, name, open(handle, "w" if handle else "r", closefd=False))  # noqa: SIM115


@contextmanager
def escape_output() -> Iterator[None]:
    """Print control characters as escapes within the context, also those printed by libraries, and unencodable ones as a ?."""
    former = sys.stdout, sys.stderr
    for stream in former:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    streams = EscapingStream(sys.stdout), EscapingStream(sys.stderr, LINES + "\r")  # \r: progress bars
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former
        for stream in streams:
            stream.is_over = True  # libraries that reset the colors of their stdout at exit would print the escape as text


def main(arguments: Sequence[str] | None = None, importing: AbstractContextManager[None] | None = None) -> int:
    """Run a command and return its exit code. 0: done; 1: a check failed; 2: the input cannot be used.

    `importing` is a context in which PyTorch and the other dependencies of the command are imported.
    """
    open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    with escape_output():
        try:
            code = run_command(given, importing or nullcontext())
            sys.stdout.flush()  # raises errors of writing here, not at interpreter exit
            return code
        except RegardError as error:
            return report_error(given, " ".join(str(error).split()))  # one line, whatever a name contains
        except KeyboardInterrupt:
            return 130
        except ReaderGoneError:  # e.g. `head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            return report_error(given, describe_os_error(error))
        except ImportError as error:  # no package, or no memory for a library
            return report_error(given, f"a library cannot be loaded: {error}.")


def run_command(given: Sequence[str], importing: AbstractContextManager[None]) -> int:
    """Parse a command, run it, and return its exit code; without a command, print the help."""
    parser = Parser(prog="regard", description=regard.__doc__)
    parser.add_argument("--version", action="version", version=f"regard {regard.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS:
        command = commands.add_parser(name, help=COMMANDS[name], description=COMMANDS[name], formatter_class=HelpFormatter)
        if name in given:  # --help of all commands needs the arguments of none
            module = import_module(f"regard.cli.arguments.{name}")
            if hasattr(module, "EPILOG"):
                command.epilog = module.EPILOG
            module.add_arguments(command)
    if not given:
        parser.print_help()
        return 0
    try:
        options, rest = parser.parse_known_args(given)
        if rest:
            commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit:
        sys.stdout.flush()
        raise
    with importing:
        module = import_module(f"regard.cli.{options.command}")
        compilation = import_module("regard.cli.compilation")
    with compilation.print_compilation(options.command):
        code: int = module.run(options)
    return code


def describe_os_error(error: OSError) -> str:
    """Return a sentence on an error of the operating system, without its number."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{error.filename or 'the output'} could not be written: {why}. Make space, or write it elsewhere."
    return f"{error.filename}: {why}." if error.filename else f"{why}."


def report_error(given: Sequence[str], message: str) -> int:
    """Print an error if stderr can be written, and return the exit code 2."""
    with suppress(OSError):
        print(f"regard {given[0]}: {escape_controls(message)}", file=sys.stderr, flush=True)
    return 2
