"""Recurrences over tokens that no map was read from, found in the operations of a module when it ends."""

from collections import Counter
from functools import cache
from operator import attrgetter

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.unread_loops import MIN_STEPS, computes_loop, is_pick, is_step
from regard.observe.interception.handwritten.unread_scans import RUNNING, combines_neighbors, sums_decayed_tokens
from regard.observe.interception.provenance import ModuleFrame

LOOP = "it multiplies a state by decays that depend on tokens, and adds tokens to it in a loop, in a form that is not followed"
SCAN = "it adds up tokens with decays that depend on tokens, by a scan of all tokens, which is not followed"
NAME = attrgetter("name")


def find_unread_recurrence(frame: ModuleFrame) -> str:
    """Return why the recurrence that the operations of a module amount to is not read; nothing if they are none."""
    operations = frame.list_operations()
    if len(operations) < 2 * MIN_STEPS:
        return ""
    counts = Counter(map(NAME, operations))
    if any(map(is_running, counts)) and sums_decayed_tokens(frame, operations):
        return SCAN
    steps = sum(count for name, count in counts.items() if is_step(name))
    if steps < MIN_STEPS or not any(map(is_pick, counts)):
        return ""
    return SCAN if combines_neighbors(frame, operations) else LOOP if computes_loop(frame, operations) else ""


@cache
def is_running(name: str) -> bool:
    """Return whether the function of this name sums or multiplies all entries up to each. Cached per name."""
    return strip_affixes(name) in RUNNING
