"""regard train: train a GPT-2 from scratch on a text of your own; the same command resumes a run."""

import argparse

from regard.cli.arguments import derived

RELEASED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

EPILOG = """\
A run lies in one folder, --out: checkpoints, log.jsonl with a line a step,
model, which GPT2.load and --model read, and pictures of it at the end. The same
command again goes on from the last checkpoint. A config file is TOML, each
setting under the name that its flag has here, the sizes under [model]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard train`: a flag for each field of the config, and of its model."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="FILE", help="a TOML file of these settings; flags go before it")
    parser.add_argument("--observe", metavar="every=N", help="write what kind each head is, every N steps, into heads.jsonl")
    parser.add_argument(
        "--plan",
        nargs="?",
        const="config",
        choices=["config", *RELEASED],
        metavar="NAME",
        help="only say what it takes, of memory, links and time: of these settings, or with the sizes of gpt2, gpt2-medium, "
        "gpt2-large, gpt2-xl",
    )
    parser.add_argument("--accelerators", nargs="+", type=int, default=[1], metavar="N", help="of a plan (1)")
    parser.add_argument("--link", type=float, default=0.0, metavar="X", help="of a plan: GB a second that each can send")
    for flag in derived.read("train"):
        derived.add_flag(parser, **flag)
