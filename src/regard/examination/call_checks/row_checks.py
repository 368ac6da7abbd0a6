"""Check that the rows of recorded attention calls sum to one over the keys, and that no key of zeros has weight."""

from collections.abc import Sequence

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.identify.mistakes import SOFTMAX
from regard.examination.report import Checked, Finding, count_calls
from regard.observe.interception.handwritten.softmax.undivided_contexts import BY_MORE, DIVIDED

ROWS = "rows of weights sum to one, over the keys"
EACH_ROW = "rows of each softmax sum to one, over the keys"
DIVIDE = f"Divide by their own sum and nothing else: {SOFTMAX}."
FILLED = (
    "Set the scores of keys that only fill up a block to -inf before the softmax: a score of 0 gives a weight of exp(0) = 1."
)
MOST_KEYS = 2048  # of a call whose weights are computed


def check_rows(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that rows of weights sum to one over tokens, as recorded calls are softmaxes; None if that is not seen of one."""
    for one in calls:
        filled = count_filled_keys(one)
        if filled > 1:  # one alone is a sink, as of nn.MultiheadAttention's add_zero_attn
            sentence = f"{filled} keys of zeros, beyond the {one.call.q.shape[2]} tokens, have weight"
            return one.report("not normalised", sentence, FILLED, 1.5, "softmax")
        if one.call.note == DIVIDED:
            sentence = "exponentials of scores are divided by something else than their sum over the keys, or by nothing"
            return one.report("not normalised", sentence, DIVIDE, 1.5, "softmax")
    if not calls or any("gate" in one.call.note or one.call.note == BY_MORE for one in calls):  # after the softmax
        return None
    mixed = next((one.mixed for one in calls if one.mixed), "")
    if mixed:
        return Checked(f"{EACH_ROW}; the heads are mixed after it: {mixed}", f"in {count_calls(calls)}")
    kernels = ", ".join(dict.fromkeys(one.call.kernel for one in calls))
    sink = " and a sink" if any(one.call.sinks is not None for one in calls) else ""
    return Checked(ROWS, f"in {count_calls(calls)}: a softmax over the keys{sink} ({kernels})")


def count_filled_keys(one: InnerCall) -> int:
    """Return how many keys of zeros after the tokens have weight."""
    q, k = one.call.q, one.call.k
    more = k.shape[2] - q.shape[2]
    if more < 1 or one.is_stored_as_weights:
        return 0
    last = k[:, :, -more:]
    zeros = int((~last.any(-1)).all(0).all(0).sum())
    if not zeros or k.shape[2] > MOST_KEYS:
        return 0
    weights = one.call.build_map(k).dense()[..., -more:]
    return int(((weights > 0).any(2).any(0).any(0) & (~last.any(-1)).all(0).all(0)).sum())
