"""Check recorded attention calls against the outputs of the projections: every property of a layer that calls show."""

from collections.abc import Iterator, Sequence

from regard.examination.call_checks.head_checks import HEADS, check_heads
from regard.examination.call_checks.position_checks import POSITIONS, SLOPES_FALL, check_positions, check_slopes
from regard.examination.call_checks.role_checks import ROLES, check_roles
from regard.examination.call_checks.scale_checks import SCALE, VALUES, check_scale, check_values
from regard.examination.call_reading import frequency_reading, late_norms, norm_reading, projection_source, terms
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.identify.mistakes import SOFTMAX
from regard.examination.report import Checked, Finding, Unknown, count_calls
from regard.observe.interception.handwritten.softmax.undivided_contexts import BY_MORE, DIVIDED

FREQUENCIES = "the frequencies of rotary positions"
ROWS = "rows of weights sum to one, over the keys"
REQUIRED = (SCALE, ROWS)  # by a verdict
EACH_ROW = "rows of each softmax sum to one, over the keys"
DIVIDE = f"Divide by their own sum and nothing else: {SOFTMAX}."
FILLED = (
    "Set the scores of keys that only fill up a block to -inf before the softmax: a score of 0 gives a weight of exp(0) = 1."
)
MOST_KEYS = 2048  # of a call whose weights are computed


def iterate_checks(
    calls: Sequence[InnerCall], stated: float | None, in_model: bool = False
) -> Iterator[tuple[str, Finding | Checked | Unknown | None]]:
    """Yield each property with its result, None if it is not known."""
    yield SCALE, check_scale(calls, stated, in_model)
    yield ROWS, check_rows(calls)
    yield HEADS, check_heads(calls)
    yield ROLES, check_roles(calls)
    for what, check in (
        (POSITIONS, check_positions),
        (FREQUENCIES, frequency_reading.check_frequencies),
        (SLOPES_FALL, check_slopes),
        (VALUES, check_values),
        (norm_reading.WHAT, norm_reading.check_norms),
        (late_norms.WHAT, check_norm_order),
        (projection_source.SAME_PLACES, check_token_places),
        (terms.WHAT, terms.check_terms),
    ):
        result = check(calls)
        if result is not None:
            yield what, result


def check_norm_order(calls: Sequence[InnerCall]) -> Finding | Unknown | None:
    """Check that norms of queries and keys come before their rotation, or commute with it; None if they do."""
    return late_norms.check_order([(one.name, late) for one in calls for late in one.late_norms])


def check_token_places(calls: Sequence[InnerCall]) -> Finding | None:
    """Check that queries, keys and values are those of the same tokens; None if none of them are seen to be shifted."""
    return projection_source.check_shifts([(one.name, one.shifts) for one in calls])


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
