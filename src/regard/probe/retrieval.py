"""Retrieval: how often a head attends most to the token of a hidden sentence that the model then writes."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.errors import ConfigError, DataError
from regard.evaluation_mode import evaluate_mode
from regard.generate.sequence_reader import compute_logits
from regard.models import GPT2
from regard.observe.record import record
from regard.observe.score_interval import Score, estimate_score
from regard.probe.repeated_tokens import find_context
from regard.text.encoder import Encoder

MOST_NEW_TOKENS = 50
ANSWERED = 0.5  # of the needle's tokens that must be in what the model writes
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the haystack, where the needle lies
LENGTH = 512  # tokens of a prompt
NEEDLES = (  # what is asked for, and the answer
    ("The secret number of the old lighthouse is", " seven hundred and forty-two thousand."),
    ("The best thing to eat in the harbor town is", " smoked trout with pickled plums and rye bread."),
    ("The name of the captain's green parrot is", " Sir Bartholomew Crumb of Little Windham."),
)


@dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with a sentence hidden in it, and the beginning of that sentence again; `needle` are the keys of its end."""

    tokens: tuple[int, ...]
    needle: range


def make_needle_prompts(
    vocabulary: Encoder,
    haystack: str,
    *,
    length: int = LENGTH,
    depths: Sequence[float] = DEPTHS,
    needles: Sequence[tuple[str, str]] = NEEDLES,
) -> list[NeedlePrompt]:
    """Hide each needle at each depth of a text, cut so that the prompt has at most `length` tokens.

    A needle is a sentence in two parts; the prompt ends with the first one, so that any language model can be asked.
    Raises DataError if the text is too short.
    """
    text = vocabulary.encode(haystack)
    found = []
    for question, answer in needles:
        question_ids = vocabulary.encode(f"\n{question}")
        all_ids, begin = join_question(vocabulary, question, answer)
        room = length - len(all_ids) - len(question_ids)
        if len(text) < room or room < 1:
            raise DataError(f"the text has {len(text):,} tokens; prompts of {length:,} tokens need {max(room, 1):,}.")
        for depth in depths:
            place = round(depth * room)
            tokens = (*text[:place], *all_ids, *text[place:room], *question_ids)
            found.append(NeedlePrompt(tokens, range(place + begin, place + len(all_ids))))
    return found


def join_question(vocabulary: Encoder, question: str, answer: str) -> tuple[list[int], int]:
    """Return the tokens of a question and its answer, and the place of the first token of the answer."""
    question_ids, all_ids = vocabulary.encode(f"\n{question}"), vocabulary.encode(f"\n{question}{answer}")
    return all_ids, next((n for n, (a, b) in enumerate(zip(question_ids, all_ids, strict=False)) if a != b), len(question_ids))


def measure_retrieval(
    model: nn.Module,
    prompts: Sequence[NeedlePrompt],
    watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda prompts, count: prompts,
) -> tuple[dict[tuple[int, int], Score], int]:
    """Return the retrieval score of each (layer, head), and the number of prompts that the model answered.

    For each prompt: of the keys of the needle, the share that have the largest weight at a step of the greedy answer at which
    their token is written. The mean and its 95 % interval are over the prompts that were
    answered: more than half of the needle's tokens are written. A score above 0.1 makes a retrieval head.
    Source: Wu et al. 2024, section 2, and the script published with it, which counts a key at each step; it ends with the line.
    """
    if not prompts:
        raise ConfigError("prompts is empty: retrieval needs at least one prompt.")
    found: dict[tuple[int, int], list[float]] = {}
    answered = 0
    with evaluate_mode(model), torch.no_grad():
        for prompt in watch(prompts, len(prompts)):
            written = write_greedily(model, prompt.tokens, MOST_NEW_TOKENS)
            scores = list(score_prompt(model, prompt, written))
            if measure_recall(prompt, written) > ANSWERED:
                answered += 1
                for place, score in scores:
                    found.setdefault(place, []).append(score)
            else:
                for place, _ in scores:
                    found.setdefault(place, [])
    return {
        place: estimate_score(scores, [], len(scores), (0.0, 1.0)) if scores else Score(math.nan)
        for place, scores in found.items()
    }, answered


def write_greedily(model: nn.Module, tokens: Sequence[int], count: int) -> list[int]:
    """Return the likeliest next tokens within the context: by the model's own generate if known, else a forward for each.

    Raises ConfigError if the tokens fill the context.
    """
    context = find_context(model)
    count = count if context is None else min(count, context - len(tokens))
    if count < 1:
        raise ConfigError(f"a prompt has {len(tokens):,} tokens, and the model's context is {context:,}: pass shorter prompts.")
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    if isinstance(model, GPT2):
        return [int(token) for token in model.generate(ids, count, temperature=0)]
    if hasattr(model, "generation_config") and hasattr(model, "generate"):
        generate: Any = model.generate
        written = generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        return [int(token) for token in written[0, len(tokens) :]]
    for _ in range(count):
        ids = torch.cat([ids, compute_logits(model, ids)[:, -1:].argmax(-1)], 1)
    return [int(token) for token in ids[0, len(tokens) :]]


def score_prompt(model: nn.Module, prompt: NeedlePrompt, written: Sequence[int]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the score of each (layer, head) on one prompt."""
    tokens = torch.tensor([*prompt.tokens, *written])
    with record(model) as recording:
        model(tokens[:-1].unsqueeze(0).to(next(model.parameters()).device))
    queries = slice(len(prompt.tokens) - 1, len(tokens) - 1)  # each predicts the token after it
    for layer in range(len(recording.layers())):
        keys = recording.map(layer)[0, :, queries].argmax(-1).cpu()  # (h, steps)
        is_written = tokens[keys] == tokens[len(prompt.tokens) :]
        copied = torch.zeros(len(keys), len(tokens) + 1, dtype=torch.bool)  # the last for keys of other tokens
        copied.scatter_(1, keys.where(is_written, len(tokens)), True)
        hits = copied[:, prompt.needle.start : prompt.needle.stop].sum(-1)
        for head, number in zip(recording.heads(layer), hits.tolist(), strict=True):
            yield (layer, head), number / len(prompt.needle)


def measure_recall(prompt: NeedlePrompt, written: Sequence[int]) -> float:
    """Return the share of the needle's tokens that are written, each as often as it stands there (ROUGE-1 recall)."""
    wanted = Counter(prompt.tokens[key] for key in prompt.needle)
    return sum((wanted & Counter(written)).values()) / len(prompt.needle)
