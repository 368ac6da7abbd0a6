"""Find queries, keys or values that were shifted by a token after their projection, against the others."""

from collections.abc import Sequence

from torch import Tensor

from regard.examination.call_reading.projection_source import ModuleOutput, ProjectionSource, find_source
from regard.examination.report import Finding

WHAT = "queries, keys and values are those of the same tokens"
CURE = "Use the query, the key and the value of each token in its own place: leave out the roll, or the padding and slice."
LEAST = 4  # tokens
WHO = ("queries", "keys", "values")


def find_shift(x: Tensor, source: ProjectionSource | None, outputs: Sequence[ModuleOutput]) -> int:
    """Return 1 if x (b, h, t, d) has in each place what an output has for the token before, -1 for the one after, else 0.

    The tokens at the ends are left out, which may be those of the other end, or zeros.
    """
    t = x.shape[2]
    if t < LEAST or (source is not None and not source.is_joined) or not x.any():
        return 0
    own = [one for one in outputs if one.output.dim() == 3 and one.output.shape[1] == t]
    for n in (1, -1):
        kept = x[:, :, 1:] if n == 1 else x[:, :, :-1]
        cut = [one._replace(output=one.output[:, :-1] if n == 1 else one.output[:, 1:]) for one in own]
        found = find_source(kept, cut)
        if found is not None and not (found.is_ambiguous or found.is_joined or found.is_viewed):
            return n
    return 0


def check_shifts(shifts: Sequence[tuple[str, tuple[int, int, int]]]) -> Finding | None:
    """Return the first of these modules whose queries, keys and values are not shifted alike; None without one."""
    for name, shift in shifts:
        who, n = next(((one, n) for one, n in zip(WHO, shift, strict=True) if n), ("", 0))
        if not n or len(set(shift)) == 1:
            continue
        return report_shift(name or "the layer", who, n, name)
    return None


def report_shift(where: str, who: str, n: int, name: str = "") -> Finding:
    """Return the finding of queries, keys or values that have in each place what the token before has, or after for n = -1."""
    here, there = (1, 0) if n == 1 else (0, 1)
    sentence = f"{who} are shifted by a token against the others: in the place of token {here} is that of token {there}"
    return Finding("wrong positions", f"in {where} {sentence}", CURE, 2.4, "positions", name)
