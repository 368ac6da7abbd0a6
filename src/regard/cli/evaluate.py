"""Run `regard evaluate`.

Exit code 2 if the model, the text or the settings cannot be used.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from regard.cli.input_text import read_exact_text
from regard.cli.model_loading import CAUSAL_LM, TextModel, load_model
from regard.cli.progress_bar import show_count_bar
from regard.errors import ConfigError, DataError
from regard.evaluate import lambada, list_published, perplexity, stop_tokens, wikitext
from regard.evaluate.perplexity import count_words_and_bytes
from regard.evaluate.published_figures import FILES
from regard.mechanism.arguments import check_count
from regard.observe.text_table import align_columns
from regard.show.number_format import format_count
from regard.show.terminal import escape_text, open_console, print_wrapped
from regard.text.corpus import Corpus, documents

DEFAULT_CONTEXT = 1024  # tokens of a window if the model has no context length
Rows = list[tuple[str, str, str | None]]  # a label, the value, and the measure of which figures were published
HUGE = 1e7  # numbers from here on are written as a power of ten
SAMPLE = 512  # tokens of a corpus that the model must decode to the same text


def run(options: argparse.Namespace) -> int:
    """Load model and text, score and print."""
    path = Path(options.on).expanduser()
    if not path.exists():
        raise DataError(f"{options.on} is neither a file nor a folder.")
    for flag in ("context", "stride", "batch"):
        if getattr(options, flag) is not None:
            check_count(f"--{flag}", getattr(options, flag))
    if path.suffix == ".jsonl" and options.stride is not None:
        raise ConfigError(
            "--stride applies to a text, whose windows overlap; a .jsonl file is read passage by passage. Leave it out."
        )
    if options.held_out is not None and not path.is_dir():
        raise ConfigError("--held-out applies to a corpus, a folder that regard.text.corpus.prepare wrote.")
    if options.wikitext and (path.is_dir() or path.suffix == ".jsonl"):
        raise ConfigError("--wikitext applies to a text; a corpus and a .jsonl file are read as they are. Leave it out.")
    text_model = load_model(options.model, CAUSAL_LM, options.device)
    context = options.context or text_model.context or DEFAULT_CONTEXT
    if text_model.context is not None and context > text_model.context:
        raise ConfigError(f"--context must be at most {text_model.context}, the model's context; got {context}.")
    known = find_published_names(path)
    start = time.perf_counter()
    if path.suffix == ".jsonl":
        rows, line, notes = score_last_words(text_model, path, context, options.batch)
    else:
        rows, line, notes = score_text(text_model, path, context, options, bool(known) or options.wikitext)
    seconds = time.perf_counter() - start
    console = open_console()
    print_wrapped(console, Text(escape_text(f"{text_model.name} on {path.name}"), style="bold"))
    print_wrapped(console, Text(f"{line} {seconds:.1f} s."))
    console.print()
    titles, *cells = add_published_figures(rows, text_model.name, known)
    for number, one in enumerate(align_columns(titles, cells, left=titles[:1])):
        console.print(Text(one, style="" if number else "dim"), no_wrap=True, overflow="crop")
    for note in notes:
        print_wrapped(console, Text(note, style="dim"))
    return 0


def score_text(
    text_model: TextModel, path: Path, context: int, options: argparse.Namespace, wiki: bool
) -> tuple[Rows, str, list[str]]:
    """Return the perplexities of a text or a corpus, a sentence about them, and notes on them."""
    tokens: Any
    if path.is_dir():
        tokens = load_matching_corpus(text_model, path, options.held_out)
        words, size = count_words_and_bytes(tokens)
    else:
        text = read_exact_text(path, newline=None if wiki else "")
        words, size = (wikitext.count_words(text) if wiki else len(text.split())), len(text.encode())
        tokens = text_model.encode(wikitext.detokenize(text) if wiki else text)
    stride = options.stride or max(context // 2, 1)
    settings = {"context": context, "stride": stride, "batch": options.batch, "words": words, "bytes": size}
    with show_count_bar("scoring", len(tokens)) as watch:
        found = perplexity(text_model.model, tokens, **settings, watch=watch)
    rows = [
        ("perplexity", "", None),
        ("by token", format_decimal(found.by_token), None),
        ("by word", format_decimal(found.by_word), "perplexity"),
        ("by byte", format_decimal(found.by_byte), None),
        ("bits per byte", format_decimal(found.bits_per_byte, 3), None),
        ("nats per token", format_decimal(found.loss_nats, 3), None),
    ]
    counts = ", ".join(format_count(n, noun) for n, noun in ((found.tokens, "token"), (words, "word"), (size, "byte")))
    line = f"{counts}; windows of {format_count(context, 'token')} moved by {stride:,}."
    spacing = "WikiText's spacing is removed; words, with an end for each line, and bytes are those of the file."
    return rows, line, [spacing] if wiki else []


def score_last_words(text_model: TextModel, path: Path, context: int, batch: int) -> tuple[Rows, str, list[str]]:
    """Return the scores of the last words of passages, a sentence about them, and notes on them."""
    passages = list(documents(path))
    stop = stop_tokens(text_model.pieces())
    with show_count_bar("passages", len(passages)) as watch:
        found = lambada(text_model.model, passages, text_model.encode, context=context, stop=stop, batch=batch, watch=watch)
    rows = [
        ("last words", "", None),
        ("perplexity", format_decimal(found.by_word), "perplexity"),
        ("by token", format_decimal(found.by_token), None),
        ("right, %", format_decimal(100 * found.accuracy), None),
        (
            "filtered, %",
            format_decimal(None if found.accuracy_filtered is None else 100 * found.accuracy_filtered),
            "accuracy, %",
        ),
    ]
    note = "Filtered: no stop word may begin the last word, as in the paper, which does not give its list."
    line = f"{format_count(found.passages, 'passage')}, {format_count(found.tokens, 'token')} of last words."
    return rows, line, [note] if stop else []


def add_published_figures(rows: Rows, model: str, known: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the rows as cells, with published figures, each with the name of its text, in a column if there are any."""
    (title, _, _), *measured = rows
    cells = [(title, "measured", "published")]
    for label, value, measure in measured:
        cells.append((label, value, ""))
        found = [one for text in known for one in list_published(model, text) if one.measure == measure]
        cells += [(f"  {one.text}", "", f"{one.figure:.2f}") for one in found]
    return cells if any(cell[2] for cell in cells[1:]) else [(label, value, "") for label, value, _ in cells]


def find_published_names(path: Path) -> Sequence[str]:
    """Return the names under which a text was published, none if it was not."""
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        return FILES.get(hashlib.file_digest(file, "sha256").hexdigest(), ())


def load_matching_corpus(text_model: TextModel, path: Path, held_out: float | None) -> Corpus:
    """Load a corpus; raise ConfigError if its tokens are not the model's."""
    corpus = Corpus.load(path)
    sample = corpus[:SAMPLE].tolist()
    if text_model.decode(sample) != corpus.text.decode(sample):
        raise ConfigError(f"{path} was prepared with {corpus.text!r}, whose tokens are not those of {text_model.name}.")
    return corpus if held_out is None else corpus.split(held_out)[1]


def format_decimal(number: float | None, digits: int = 2) -> str:
    """Format a number with `digits` decimals, as a power of ten if it is huge, empty for None."""
    return "" if number is None else f"{number:,.{digits}f}" if number < HUGE else f"{number:.2e}"
