"""The finding of a text that a language model read: the head without which the prediction falls most, and what it looks at."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from regard.errors import ConfigError
from regard.observe.head_table import quote_word
from regard.show.page.attributions import Target
from regard.show.page.finding import (
    OpeningFinding,
    explain_key,
    find_first_token,
    format_share,
    is_short,
    name_head,
    name_word,
    view_layer,
)
from regard.show.page.model_adapter import ModelAdapter, name_token
from regard.show.page.next_word_ablation import HeadAblation, measure_heads
from regard.show.page.recording_entry import RecordingEntry

EFFECT = "effect"  # what is shown
MIN_SEEN_WEIGHT = 0.2  # of a token besides the first and the marked one, from which on it is seen what a head looks at
MIN_LOSS = 0.01  # of a probability, below which it is said that no head is needed


def find_text_effect(
    adapter: ModelAdapter,
    entry: RecordingEntry,
    get_target: Callable[[], Target],
    run_steps: Callable[[Iterator[HeadAblation]], Iterable[HeadAblation]] = iter,
) -> OpeningFinding | None:
    """Return what the prediction of a target needs most, see `find_effect`; None without one, or without gradients.

    None for a long text, too. run_steps iterates over the heads that are taken out, each step of which runs the model.
    """
    if entry.ids is None or not is_short(entry):
        return None
    try:
        target = get_target()
        measured = list(run_steps(measure_heads(adapter, entry.ids, entry, target)))
    except ConfigError:  # no gradient can be taken, or no single head taken out
        return None
    return find_effect(entry, adapter, (target.at, target.token), measured)


def find_effect(
    entry: RecordingEntry, adapter: ModelAdapter, target: tuple[int, int], measured: Sequence[HeadAblation]
) -> OpeningFinding | None:
    """Return what the prediction of a token after a position, the target, needs most, among heads that were taken out.

    It is the head with the largest loss among those that put MIN_SEEN_WEIGHT on one token besides the first and their own, or
    among all where none does. None where the loss of every head is below MIN_LOSS.
    """
    at, token = target
    losses = sorted((one for one in measured if one.loss >= MIN_LOSS), key=lambda one: -one.loss)
    if not losses:
        return None
    seen = [one for one in losses if float(find_seen(entry, one, at).max()) >= MIN_SEEN_WEIGHT]
    chosen = (seen or losses)[0]
    row = entry.get_map(chosen.place)[0, 0, at]
    k = int((find_seen(entry, chosen, at) if seen else row).argmax())
    words, _ = entry.get_axis_words(chosen.place)
    relations = explain_key(words, at, k, find_first_token(view_layer(entry, chosen.place)))
    number = entry.get_head_number(chosen.place)
    word = name_prediction(adapter, token)
    others = "" if chosen.instead == token else f", and {name_prediction(adapter, chosen.instead)} comes first"
    sentences = (
        f"{name_head(chosen.place.layer, number)} looks from {name_word(words, at)} at {name_word(words, k)}"
        f"{next(iter(relations.values()), '')}: {format_share(row[k])} of its attention.",
        f"Without it {word} as the next token falls from {format_share(chosen.before)} to {format_small(chosen.after)}"
        f"{others}.",
        "Switch it off to see it, or select another token.",
    )
    return OpeningFinding(EFFECT, chosen.place, at, k, sentences, chosen.loss)


def find_seen(entry: RecordingEntry, one: HeadAblation, at: int) -> Tensor:
    """Return the weights of a row of a head, (k,), those on the first token and on the marked one as 0."""
    row = entry.get_map(one.place)[0, 0, at].nan_to_num(0.0).clone()
    row[find_first_token(view_layer(entry, one.place))] = row[at] = 0
    return row


def name_prediction(adapter: ModelAdapter, token: int) -> str:
    """Return a predicted token in quotes, or that it is the end."""
    named = name_token(adapter, token)
    return "the end of the text" if named.get("ends") else quote_word(named["word"])


def format_small(share: float) -> str:
    """Format a share in percent, one below 1 % with one significant digit."""
    return f"{100 * share:.1g} %" if share < 0.01 else format_share(share)
