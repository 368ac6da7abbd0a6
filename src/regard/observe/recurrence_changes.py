"""Changes of recurrences that an intervention cannot make, and why."""

from regard.map.convolution import Convolution
from regard.observe.attention_changes import Change, KnockOut, Patch
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

CONTINUED = "it continues a state of tokens whose positions are not known, so that only KnockOut without a source changes it"
NO_SCORES = "it has no scores that a temperature divides"
OTHER_OUTPUT = "its output is not its weights times the values alone: it has a bias or a gate"
NO_WEIGHTS = "weights of a recurrence are not patched: patch its output"


def explain_impossible(change: Change, call: RecurrenceCall, plain: AttentionCall, changed: AttentionCall) -> str:
    """Return why a change that makes a plain call a changed one cannot be made of a recurrence; "" if it can."""
    if call.must_continue and call.initial_state is not None and not (isinstance(change, KnockOut) and change.source is None):
        return CONTINUED
    if changed is not plain and changed.q is not plain.q:
        return NO_SCORES
    if isinstance(change, Patch) or (isinstance(change, KnockOut) and change.source is not None):
        if isinstance(change, Patch) and change.of == "weights":
            return NO_WEIGHTS
        found = call.read()
        if found.gates is not None or (isinstance(found.mechanism, Convolution) and found.mechanism.bias is not None):
            return OTHER_OUTPUT
    return ""
