"""The kinds of heads, and the rule by which the scores of a head decide its kind."""

import math
from collections.abc import Mapping

from regard.observe.score_interval import Score

THRESHOLDS = {  # of the weight that names a head
    "previous token": 0.4,
    "itself": 0.4,
    "duplicate": 0.4,
    "induction": 0.4,
    "first token": 0.3,  # Gu et al. 2024
}
STRIPE, STRIPED = "stripe", 0.4  # a kind, and the weight that names it
BROAD = 0.5  # of the keys
FAIR = 0.2  # of a score corrected for chance, above which agreement is more than slight (Landis and Koch 1977)
MIN_SUPPORT = 8  # queries that count, with fewer of which no kind is claimed
UNCLEAR = "unclear"  # the kind of a head whose scores leave it open
PREFIX_MATCHING = "prefix matching"  # the kind that `induction` is called where it is not known whether the head copies
ACTIONS = {
    "previous token": "attends to the previous token",
    "itself": "attends to its own token",
    "duplicate": "attends to earlier occurrences of its token",
    "induction": "attends to what followed its token before",
    PREFIX_MATCHING: "attends to what followed its token before",
    "first token": "attends to the first token",
    STRIPE: "attends to the same few tokens from everywhere",
    "broad": "attends to half of its keys or more",
    "local": "attends to tokens nearby",
}
# The most telling first:
TELLING_KINDS = ("induction", PREFIX_MATCHING, "duplicate", "previous token", "first token", STRIPE, "itself")
RETRIEVAL, RETRIEVED = "retrieval", 0.1  # a score, and above what it makes a retrieval head: Wu et al. 2024
SUCCESSION, SUCCEEDS = "succession", 0.5  # a score, and above what the next word is raised more often than not
EFFECT, TEXT_EFFECT = "effect", "effect on text"  # scores that are the rise of the loss without the head
RULES = {PREFIX_MATCHING: "induction", "broad": "breadth", "local": "local"}  # scores of kinds with another name


def infer_kind(scores: Mapping[str, Score], halfway: float = math.nan) -> str:
    """Return the kind of a head with these scores, by the rule of `heads`."""
    claimed = {name: scores[name] for name in THRESHOLDS if name in scores and exceeds(scores[name], THRESHOLDS[name])}
    for name, score in claimed.items():
        if all(score.low > rival.high for key, rival in claimed.items() if key != name):
            copies = "copying" in scores and scores["copying"].low > 0
            return PREFIX_MATCHING if name == "induction" and not copies else name
    if STRIPE in scores and exceeds(scores[STRIPE], STRIPED):
        return STRIPE
    if "breadth" in scores and has_support(scores["breadth"]) and scores["breadth"].low > BROAD:
        return "broad"
    return "local" if "local" in scores and has_support(scores["local"]) and scores["local"].low > halfway else UNCLEAR


def exceeds(score: Score, threshold: float) -> bool:
    """Return whether a kind can be claimed of a score: enough queries count, and its interval is above threshold and chance."""
    return has_support(score) and score.low > threshold and not score.low_above_chance <= FAIR


def has_support(score: Score) -> bool:
    """Return whether enough queries count to a score that a kind can be claimed."""
    return score.count >= MIN_SUPPORT
