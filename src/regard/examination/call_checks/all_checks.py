"""Check recorded attention calls against the outputs of the projections: every property of a layer that calls show."""

from collections.abc import Iterator, Sequence

from regard.examination.call_checks import slope_checks, value_scale
from regard.examination.call_checks.head_checks import HEADS, check_heads
from regard.examination.call_checks.position_checks import POSITIONS, check_positions
from regard.examination.call_checks.role_checks import ROLES, check_roles
from regard.examination.call_checks.row_checks import ROWS, check_rows
from regard.examination.call_checks.scale_checks import SCALE, check_scale
from regard.examination.call_reading import frequency_reading, late_norms, norm_reading, terms, token_shift
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Checked, Finding, Unknown

FREQUENCIES = "the frequencies of rotary positions"
REQUIRED = (SCALE, ROWS)  # by a verdict


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
        (slope_checks.WHAT, slope_checks.check_slopes),
        (value_scale.WHAT, value_scale.check_values),
        (norm_reading.WHAT, norm_reading.check_norms),
        (late_norms.WHAT, check_norm_order),
        (token_shift.WHAT, check_token_places),
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
    return token_shift.check_shifts([(one.name, one.shifts) for one in calls])
