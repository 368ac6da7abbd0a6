"""The arguments of `regard evaluate`."""

import argparse

EPILOG = """\
FILE is a text; a .jsonl file of passages {"text": ...} whose last words are
predicted, as in LAMBADA; or a folder that regard.text.corpus.prepare wrote.
The model reads a window of --context tokens at a time, the next one --stride
tokens later; every token but the first is scored once. A small stride gives
each token more context, and takes longer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard evaluate`."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=True,
        help="GPT-2 weights from any source; gpt2; sorter; or a Hugging Face model: folder, .gguf file or hub name",
    )
    parser.add_argument("--on", metavar="FILE", required=True, help="a text, a .jsonl of passages, or a corpus")
    parser.add_argument("--context", metavar="N", type=int, help="tokens read at a time (the model's context)")
    parser.add_argument("--stride", metavar="N", type=int, help="tokens from one window to the next (half of the context)")
    parser.add_argument("--batch", metavar="N", type=int, default=4, help="windows or passages at a time (4)")
    parser.add_argument("--device", metavar="NAME", default="cpu", help="where it runs, e.g. cuda (cpu)")
    parser.add_argument("--held-out", metavar="SHARE", type=float, help="for a corpus: only the last share of it, e.g. 0.05")
    parser.add_argument("--wikitext", action="store_true", help="the text is WikiText: remove its spacing, count its words")
