"""Check that each head of recorded attention calls has its own part of the projections, in the same order."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from regard.examination.call_checks.role_checks import read_role
from regard.examination.call_reading.bias_reading import find_viewed_table
from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import BY_HEAD, BY_WIDTH, ProjectionSource
from regard.examination.identify.mistakes import SPLIT, describe_mixed_heads
from regard.examination.report import UNUSED_HEADS, Checked, Finding, count_calls
from regard.examination.subject.call_conventions import ROLE_NAMES

HEADS = "heads are independent"
OWN_HEADS = "heads of queries and keys are independent"  # where values come from, or contexts go, is not known
PERMUTE = "View the rows as (queries, keys, heads) and permute them: table[index].view(q, k, heads).permute(2, 0, 1)."
ORDER = "Split queries, keys and values into heads in the same way, and leave the heads in their order."
STRIDED = ", whose columns are not neighbors"
NUMBER = re.compile(r"(?:n|num|number|nr)?_?(?:of_)?(?:attention_|attn_|query_)?heads?|h")
WIDTH = re.compile(r"heads?_(?:dim|size|width|d)|d_?(?:head|k)|dim_(?:per_)?head|d_per_head")


def check_heads(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that each head has its own part of the projections, and that key heads serve neighbors; None if not known."""
    for one in calls:
        wrong = next((reading for reading in (one.absorbed, one.output) if reading is not None and reading.wrong), None)
        if wrong is not None:
            return one.report(wrong.kind, wrong.wrong, wrong.cure, 1.6, "heads")
        table = find_viewed_table(one)
        if table:
            does = f"the rows of {table} are viewed as (heads, queries, keys): heads and tokens are mixed in the bias"
            return one.report("mixed heads", does, PERMUTE, 1.6, "heads")
        exchanged = describe_exchanged_axes(one.module, one.call.q.shape[1], one.width)
        if exchanged:
            return one.report("mixed heads", exchanged, SPLIT, 1.6, "heads")
    if calls and all(one.absorbed is not None and one.output is not None for one in calls):
        what = f"{HEADS}: {calls[0].call.q.shape[1]}, of latents"
        return Checked(what, f"in {count_calls(calls)}, by the products that absorb the weights of keys and values")
    sources = [source for one in calls for source in (one.q_source, one.k_source)]
    if not sources or not all(source is not None and source.slices for source in sources):
        return None
    for one in calls:
        mixed = find_mixed_heads(one) or find_unused_heads(one, calls)
        if mixed is not None:
            return mixed
    if any(source is not None and source.is_ambiguous for source in sources):
        return None
    heads = calls[0].call.q.shape[1]
    of = HEADS if all(one.output is not None and one.v_source is not None for one in calls) else OWN_HEADS
    strided = STRIDED if any(source is not None and source.order not in ("", BY_HEAD) for source in sources) else ""
    what = f"{of}: {heads} of width {calls[0].width}{strided}"
    return Checked(what, f"in {count_calls(calls)}, by the norms of queries and keys")


def mixes_tokens(calls: Sequence[InnerCall]) -> bool:
    """Return whether heads are split, or joined, by a view that mixes tokens and heads, which `check_heads` reports."""
    sources = [source for one in calls for source in (one.q_source, one.k_source, one.v_source) if source is not None]
    is_joined = any(one.output is not None and one.output.kind == "mixed heads" for one in calls)
    return (is_joined or any(source.is_viewed for source in sources)) and isinstance(check_heads(calls), Finding)


def find_mixed_heads(one: InnerCall) -> Finding | None:
    """Return the finding of heads that are views of tokens and heads, or of key heads in another order."""
    q, k = one.q_source, one.k_source
    assert q is not None
    assert k is not None
    sources = {"q": q, "k": k} | ({} if one.v_source is None else {"v": one.v_source})
    viewed = "".join(letter for letter, source in sources.items() if source.is_viewed)
    if viewed:
        wrong = describe_mixed_heads(viewed)
        return one.report(wrong.kind, wrong.does, wrong.cure, 1.6, "heads")
    unlike = describe_other_order(sources)
    if unlike:
        return one.report("mixed heads", unlike, ORDER, 1.6, "heads")
    for letter, source in list(sources.items())[1:]:
        heads, groups = len(source.slices), len(set(source.slices))
        is_tiled = 1 < groups < heads == len(q.slices) and source.slices == source.slices[:groups] * (heads // groups)
        if is_tiled and source.slice_count:
            wrong = describe_mixed_heads("tiled")
            does = wrong.does if letter == "k" else wrong.does.replace("key heads", "heads of values, not of keys,")
            return one.report(wrong.kind, does, wrong.cure, 1.6, "heads")
    crossed = find_crossed_heads(q, k)
    if crossed:
        return one.report("mixed heads", crossed, ORDER, 1.6, "heads")
    other = None if one.v_source is None else find_other_place(k, one.v_source)
    if other is not None:
        does = "head {} of the keys is part {} of {}, but head {} of the values is part {} of {}".format(*other)
        return one.report("mixed heads", does, ORDER, 1.6, "heads")
    return None


def describe_other_order(sources: Mapping[str, ProjectionSource]) -> str:
    """Describe that queries, keys and values are not all split into heads in the same order; "" if they are."""
    split = {letter: source.order for letter, source in sources.items() if source.order and len(set(source.slices)) > 1}
    orders = {letter: order if order == BY_WIDTH else BY_HEAD for letter, order in split.items()}
    for one, other in itertools.pairwise(orders):
        if orders[one] != orders[other]:
            return f"{ROLE_NAMES[one]} are split into heads as {orders[one]}, but {ROLE_NAMES[other]} as {orders[other]}"
    return ""


def find_unused_heads(one: InnerCall, calls: Sequence[InnerCall]) -> Finding | None:
    """Return the finding of heads that the projections of queries and keys, or of keys, make and that no call of them uses.

    A projection of queries may make a gate beside them, and one whose name does not state keys may make values too.
    """
    q, k = one.q_source, one.k_source
    if q is None or k is None or q.name == k.name or not (read_role(k) == "k" or one.widths[1]):
        return None
    names, count = [k.name] if q.slice_count != k.slice_count else [q.name, k.name], k.slice_count
    used = len({part for name in names for part in list_used_slices(name, calls)})
    if used >= count:
        return None
    makes = f"{' and '.join(names)} make{'s' * (len(names) == 1)} {'are' if used > 1 else 'is'} used"
    return one.report("mixed heads", f"only {used} of the {count} heads that {makes}", ORDER, 1.6, UNUSED_HEADS)


def list_used_slices(name: str, calls: Sequence[InnerCall]) -> Iterator[int]:
    """Yield the slices of the output of this name that queries or keys of a call come from."""
    for source in (source for one in calls for source in (one.q_source, one.k_source)):
        if source is not None and source.name == name:
            yield from source.slices


def find_crossed_heads(q: ProjectionSource, k: ProjectionSource) -> str:
    """Return the first head of queries that meets the keys of another head, or of another group of heads, in words, else ""."""
    heads, rest = divmod(len(q.slices), len(k.slices))
    group, more = divmod(len(set(q.slices)), len(set(k.slices)))
    if rest or more or not (q.slice_count and k.slice_count):
        return ""
    queries, keys = list_places(q), [place for place in list_places(k) for _ in range(heads)]
    for i, (own, met) in enumerate(zip(queries, keys, strict=True)):
        if own // group != met:
            return f"head {i} of the queries is part {own} of {q.name}, but the keys that it meets are part {met} of {k.name}"
    return ""


def list_places(source: ProjectionSource) -> list[int]:
    """Return the place of each head among the parts of its projection that are used."""
    used = sorted(set(source.slices))
    return [used.index(part) for part in source.slices]


def find_other_place(k: ProjectionSource, v: ProjectionSource) -> tuple[object, ...] | None:
    """Return the first head whose values have another place among the parts of their projection than its keys, in words."""
    places = [list_places(source) for source in (k, v)]
    if not (k.slice_count and v.slice_count) or len(places[0]) != len(places[1]) or places[0] == places[1]:
        return None
    i = next(i for i, (one, other) in enumerate(zip(*places, strict=True)) if one != other)
    return i, places[0][i], k.name, i, places[1][i], v.name


def describe_exchanged_axes(module: nn.Module | None, heads: int, width: int) -> str:
    """Describe that a layer has the width of a head as its number of heads, and the reverse; "" if it does not state both."""
    if module is None or heads == width:
        return ""
    number, wide = (next(list_attributes(module, name, size), "") for name, size in ((NUMBER, width), (WIDTH, heads)))
    if not number or not wide:
        return ""
    return f"there are {heads} heads of width {width}, though {number} is {width} and {wide} is {heads}"


def list_attributes(module: nn.Module, pattern: re.Pattern[str], size: int) -> Iterator[str]:
    """Yield the attributes of a module whose names match and whose number is this one."""
    for name, one in vars(module).items():
        if isinstance(one, int) and not isinstance(one, bool) and one == size and pattern.fullmatch(name.strip("_").lower()):
            yield name
