"""The arguments of `regard generate`."""

import argparse

from regard.cli.arguments import derived
from regard.cli.arguments.look import MODEL, add_device_argument

EPILOG = """\
TEXT is a file, or the words themselves, or - for standard input. If the
folder of the model has no vocabulary, TEXT is token numbers. --look averages
the attention of the token before each new one, over all heads of the last
quarter of the layers."""

TOKENS = 100  # the default, if the context has room
FLAGS = {
    "temperature": "below 1 less random, above 1 more random, 0 always the likeliest token",
    "top_k": "only the N likeliest tokens; 0 for all",
    "top_p": "only the likeliest tokens that together have this probability",
    "min_p": "only tokens at least X times as likely as the likeliest",
    "repetition_penalty": "above 1 avoids tokens that came before",
    "beams": "search for the likeliest text with N beams, instead of sampling",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard generate`."""
    parser.add_argument("text", metavar="TEXT", help="a text file, the words themselves, or -")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=MODEL,
        help="GPT-2: a folder or file of weights, or sorter, gpt2, gpt2-medium, ...; smollm2; a folder or .gguf file of Llama, "
        "Mistral or Qwen2 (pocket)",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, help=f"how many to generate ({TOKENS}, or what fits into the context)"
    )
    for name, default in derived.read_flags("generate").items():
        flag, kind, says = name.replace("_", "-"), type(default), FLAGS[name]
        parser.add_argument(f"--{flag}", metavar="NX"[kind is float], type=kind, default=default, help=f"{says} ({default:g})")
    parser.add_argument("--seed", metavar="N", type=int, help="sample the same text again")
    parser.add_argument("--stop", metavar="WORDS", action="append", help="end before these words; may be given more than once")
    parser.add_argument("--past", choices=("refuse", "slide"), default="refuse", help="beyond the model's context (refuse)")
    add_device_argument(parser)
    parser.add_argument("--top", metavar="N", type=int, default=0, help="show the N likeliest tokens under each")
    parser.add_argument("--look", action="store_true", help="show what each new token looked at")
