"""Read the rotation of the last columns of queries and keys in latent attention, which the keys of all heads share.

Source: DeepSeek-V2, section 2.1.3.
"""

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.rotary_reading import find_mistakes, is_near, read_rotary


def find_wrong_rotation(one: InnerCall) -> str:
    """Return what is wrong with the rotation of the last columns, which the keys of all heads share; "" if nothing is."""
    shared, source = None if one.k_source is None else one.k_source.shared, one.q_source
    if shared is None or source is None or source.is_joined or source.projected.shape != one.call.q.shape:
        return ""
    n = shared.shape[-1]
    pairs = ((source.projected[..., -n:], one.call.q[..., -n:].double()), (shared, one.call.k[:, :1, :, -n:].double()))
    q, k = (read_rotary(*pair) for pair in pairs)
    if q is not None and k is not None:
        return next(find_mistakes(q, k), "")
    plain = [before.shape == after.shape and is_near(before, after, before) for before, after in pairs]
    if (q is None) == (k is None) or not plain[q is not None]:
        return ""
    rotated, other = ("queries", "keys") if k is None else ("keys", "queries")
    return f"the last {n} columns of {rotated} are rotated by their positions, but those of {other}, which they meet, are not"
