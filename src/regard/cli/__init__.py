"""The command line: one file for each command, which parses, builds, calls and prints."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import regard
from regard.cli import evaluate, examine, generate, heads, info, look, serve, train, translate, verify, walk
from regard.errors import RegardError

COMMANDS = {
    "walk": walk,
    "look": look,
    "heads": heads,
    "serve": serve,
    "generate": generate,
    "train": train,
    "evaluate": evaluate,
    "translate": translate,
    "examine": examine,
    "verify": verify,
    "info": info,
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. 0: done; 1: what was checked does not hold; 2: the input cannot be used."""
    parser = Parser(prog="regard", description=regard.__doc__)
    parser.add_argument("--version", action="version", version=f"regard {regard.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0].partition(": ")[2]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments)
    if rest:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int = COMMANDS[options.command].run(options)
        sys.stdout.flush()  # what cannot be written is met here, and not after the end
        return code
    except RegardError as error:
        print(f"regard {options.command}: {' '.join(str(error).split())}", file=sys.stderr)  # one line, whatever a name holds
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # no room on the disk, say
        print(f"regard {options.command}: {error}", file=sys.stderr)
        return 2
