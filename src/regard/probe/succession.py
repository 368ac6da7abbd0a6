"""Succession: whether a head, where it attends to a word of a sequence such as Monday, raises the next word most."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from regard.attribution.model_parts import ModelParts, find_parts, trace_forward
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.heads import share
from regard.observe.record import record
from regard.observe.score_interval import Score, estimate_share
from regard.probe.probe_heads import find_vocabulary
from regard.probe.repeated_tokens import find_begin_token, make_probe_of_model
from regard.text.encoder import Encoder

SEQUENCES = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday Monday",
    "January February March April May June July August September October November December January",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty",
    "first second third fourth fifth sixth seventh eighth ninth tenth",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    "1 2 3 4 5 6 7 8 9",
)
FEWEST = 3  # steps of a sequence whose words are tokens, else it is left out


@dataclass(frozen=True)
class Succession:
    """One step of a sequence: a token, the next one, and all tokens of the sequence, among which the next is to be raised."""

    token: int
    following: int
    sequence: tuple[int, ...]


def make_successions(vocabulary: Encoder, sequences: Sequence[str] = SEQUENCES) -> list[Succession]:
    """Return the steps of the sequences between words that are single tokens, with a space before them or else without.

    Of each sequence the spelling is taken in which more steps are left; a sequence of fewer than three steps is left out.
    """
    found = []
    for sequence in sequences:
        spellings = [[vocabulary.encode(f"{space}{word}") for word in sequence.split()] for space in (" ", "")]
        steps = max((list_steps(words) for words in spellings), key=len)
        if len(steps) >= FEWEST:
            found += steps
    return found


def list_steps(words: list[list[int]]) -> list[Succession]:
    """Return the steps between neighbors that are single tokens."""
    sequence = tuple(dict.fromkeys(word[0] for word in words if len(word) == 1))
    return [Succession(one[0], other[0], sequence) for one, other in pairwise(words) if len(one) == len(other) == 1]


@torch.no_grad()
def measure_succession(
    model: nn.Module, successions: Sequence[Succession], unembedding: Tensor | None = None
) -> dict[tuple[int, int], Score]:
    """Return the succession score of each (layer, head), from 0 to 1, with its 95 % interval over the steps (Wilson).

    The share of the steps at which the head raises the next token's logit above those of all other tokens of the sequence,
    where it attends to the token: the logits are the direct path v W_O N u, with v the value of the token after the model's
    begin token, W_O the head's part of the output projection, N the last norm and u the rows of the unembedding.
    Raises ConfigError if there are no steps, or if the parts of the model were not found.
    Source: Gould et al. 2023, "Successor heads": the proportion of ordinal tokens at which succession occurs. They compute the
    value from the embedding and the first MLP alone.
    """
    if not successions:
        raise ConfigError("succession needs words of a sequence, such as Monday, that are single tokens of this model.")
    begin, device = find_begin_token(model), next(model.parameters()).device
    ids = torch.tensor([[*([] if begin is None else [begin]), one.token] for one in successions], device=device)
    probe = make_probe_of_model(model, find_vocabulary(model, unembedding), seeds=2)
    with evaluate_mode(model):
        trace, recording, logits = trace_forward(model, probe.tokens.to(device))
        parts = find_parts(model, trace, recording, logits, unembedding)
        with record(model, keep="values") as recording:
            compute_logits(model, ids)
    found: dict[tuple[int, int], Score] = {}
    for layer, name in enumerate(recording.layers()):
        values, output = recording.values(layer), parts.layers[name].output
        if values is None or output is None:
            continue
        written = torch.einsum("bhe,hec->bhc", share(values.to(output), len(output))[:, :, -1], output)
        hits = torch.stack([raises_following(written[n], one, parts) for n, one in enumerate(successions)])  # (steps, h)
        for head, number in enumerate(recording.heads(layer)):
            found[layer, number] = estimate_share(int(hits[:, head].sum()), len(successions))
    return found


def raises_following(written: Tensor, step: Succession, parts: ModelParts) -> Tensor:
    """Return whether what each head writes, (h, c), raises the next token above all others of its sequence, bool (h,)."""
    logits = written @ parts.norm.apply_transposed(parts.unembedding[list(step.sequence)]).T
    is_next = torch.tensor(step.sequence, device=logits.device) == step.following
    return logits[:, is_next].amax(-1) > logits.masked_fill(is_next, -torch.inf).amax(-1)
