"""Handlers of the addresses under /api that answer GET in one piece, and the heads they need."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from regard.errors import ConfigError
from regard.map.codes import encode_weights
from regard.map.implicit_map import ImplicitMap
from regard.observe.rollout import roll_out_until
from regard.show.page import attributions, exact_weights, implicit_pictures, params
from regard.show.page.finding import FINDINGS
from regard.show.page.head_pictures import Alive, OpenedHead, make_thumbnails
from regard.show.page.json_encoding import encode_json
from regard.show.page.params import MissingError
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, check_index, truncate_word
from regard.show.page.session import MAX_STEP_WORDS, Session
from regard.show.page.steps_json import compute_head_steps, get_example_steps

MAX_WORDS = 5000  # maximum words of one answer
HeadData = list[Any]  # what a handler needs of each head, computed before it runs
NeededHeads = list[tuple[RecordingEntry, HeadPlace]]


class Handler(NamedTuple):
    """The handler of an address: `respond` gets `select_data` of each head that `list_needed_heads` returns."""

    respond: Callable[[Session, Request, HeadData], Response]
    list_needed_heads: Callable[[Session, Request], NeededHeads] = lambda session, request: []
    select_data: Callable[[OpenedHead], Any] = attrgetter("pyramid")


def handle_start(session: Session, request: Request, found: HeadData) -> Response:
    """Return the initial state of the page."""
    return make_json_response(session.get_start_state())


def handle_recordings(session: Session, request: Request, found: HeadData) -> Response:
    """Return the summaries of those of some recordings that are here: a visitor's own ones, or that of a link."""
    names = params.parse_names(request.query_params, "ids")
    return make_json_response({"recordings": session.summarize_recordings(names)})


def handle_story(session: Session, request: Request, found: HeadData) -> Response:
    """Return the text that the model wrote, token by token."""
    return make_json_response(session.get_story(request.path_params["id"]))


def handle_example(session: Session, request: Request, found: HeadData) -> Response:
    """Return the steps of one of the lectures' examples."""
    return make_json_response(
        get_example_steps(
            params.parse_name(request.query_params, "name"), params.parse_integer(request.query_params, "head", 0)
        )
    )


def handle_words(session: Session, request: Request, found: HeadData) -> Response:
    """Return words along an axis."""
    query = request.query_params
    first, last = params.parse_integer(query, "from", 0), params.parse_integer(query, "to", 2000)
    lists, name = (
        get_entry(session, request).get_word_lists(params.parse_integer(query, "b", 0)),
        params.parse_name(query, "list", "words"),
    )
    if name not in lists:
        raise MissingError(f"there is no list of words {name!r}; the lists are {', '.join(lists) or 'none'}.")
    if last - first > MAX_WORDS:
        raise ConfigError(f"at most {MAX_WORDS:,} words can be requested at a time, got {first} to {last}.")
    return make_json_response({"words": [truncate_word(word) for word in lists[name][first:last]]})


def handle_thumbnails(session: Session, request: Request, found: HeadData) -> Response:
    """Return small pictures of the heads of a layer."""
    pictures, sampled = make_thumbnails(get_entry(session, request), params.parse_place(request.query_params))
    return make_binary_response(pictures, {"x-sampled": str(int(sampled))})


def handle_tile(session: Session, request: Request, found: HeadData) -> Response:
    """Return a tile of a head's picture."""
    query = request.query_params
    level, row, column = (params.parse_integer(query, name) for name in ("level", "row", "column"))
    (pyramid,) = found
    place = level, row, column, params.parse_name(query, "how", "mean")
    codes = pyramid.codes(*place)
    return make_weight_response(request, pyramid.tile(*place), codes != 0) if "exact" in query else make_binary_response(codes)


def handle_cell(session: Session, request: Request, found: HeadData) -> Response:
    """Return one weight."""
    query = request.query_params
    return make_json_response(
        exact_weights.get_cell(
            get_entry(session, request),
            params.parse_place(query),
            params.parse_integer(query, "q"),
            params.parse_integer(query, "k"),
        )
    )


def handle_row(session: Session, request: Request, found: HeadData) -> Response:
    """Return the weights of a query."""
    return make_weight_response(request, *get_requested_row(session, request))


def handle_column(session: Session, request: Request, found: HeadData) -> Response:
    """Return the weights on a key."""
    return make_weight_response(request, *exact_weights.get_column(found, params.parse_integer(request.query_params, "k")))


def handle_top(session: Session, request: Request, found: HeadData) -> Response:
    """Return the largest weights of a row or of a column."""
    query = request.query_params
    rows, columns = get_entry(session, request).get_axis_words(params.parse_place(query))
    if "q" in query:
        (weights, _), along = get_requested_row(session, request), columns
    else:
        (weights, _), along = exact_weights.get_column(found, params.parse_integer(query, "k")), rows
    return make_json_response({"found": exact_weights.list_largest(weights, along, params.parse_integer(query, "n", 8))})


def get_requested_row(session: Session, request: Request) -> tuple[Tensor, Tensor]:
    """Compute the weights of a row, the mean of some heads, and which of them are visible."""
    query = request.query_params
    return exact_weights.get_row(
        get_entry(session, request),
        params.parse_place(query),
        params.parse_integer(query, "q"),
        params.parse_integers(query, "heads"),
    )


def handle_steps(session: Session, request: Request, found: HeadData) -> Response:
    """Return the steps of a head."""
    query = request.query_params
    q = params.parse_integer(query, "q") if "q" in query else None
    return make_json_response(compute_head_steps(get_entry(session, request), params.parse_place(query), q, MAX_STEP_WORDS))


def need_one_head(session: Session, request: Request) -> NeededHeads:
    """Return the requested head as the only one needed."""
    entry, place = get_entry(session, request), params.parse_place(request.query_params)
    entry.get_shape(place)
    return [(entry, place)]


def need_heads(session: Session, request: Request) -> NeededHeads:
    """Return the requested heads of a layer, whose row denominators are needed."""
    ((entry, place),) = need_one_head(session, request)
    return [
        (entry, other)
        for other in exact_weights.list_places(entry, place, params.parse_integers(request.query_params, "heads"))
    ]


def need_axis_heads(session: Session, request: Request) -> NeededHeads:
    """Return the heads needed for the largest weights: those requested for a column, none for a row."""
    return [] if "q" in request.query_params else need_heads(session, request)


def handle_settings(session: Session, request: Request, alive: Alive) -> Response:
    """Return for each setting besides the weight why it cannot be shown, null where it can."""
    return make_json_response(session.explain_settings(get_entry(session, request), alive))


def handle_target(session: Session, request: Request, alive: Alive) -> Response:
    """Return the logit whose changes are shown, and the likeliest words in its place."""
    return make_json_response(session.describe_target(get_entry(session, request), *parse_target(request), alive))


def handle_attribution(session: Session, request: Request, alive: Alive) -> Response:
    """Return a row, a column or a tile of what weights do, as numbers of 32 bits; NaN where nothing is visible."""
    query = request.query_params
    entry, place = get_entry(session, request), params.parse_place(query)
    setting = params.parse_choice(query, "show", attributions.SETTINGS)
    heads = [one.head for one in exact_weights.list_places(entry, place, params.parse_integers(query, "heads"))]
    m = session.get_attribution_map(entry, place, setting, *parse_target(request), alive)
    if "q" in query or "k" in query:
        q, k = (params.parse_integer(query, name) if name in query else None for name in ("q", "k"))
        return make_number_response(attributions.compute_line(m, heads, q=q, k=k))
    level, row, column = (params.parse_integer(query, name) for name in ("level", "row", "column"))
    how = params.parse_choice(query, "how", ("mean", "max"))
    return make_number_response(attributions.draw_tile(m.select(heads=[place.head]), level, row, column, how))


def handle_attribution_thumbnails(session: Session, request: Request, alive: Alive) -> Response:
    """Return small pictures of what the weights of all heads of a layer do, as numbers of 32 bits, and the sum of each head."""
    entry, place = get_entry(session, request), params.parse_place(request.query_params)
    setting = params.parse_choice(request.query_params, "show", attributions.SETTINGS)
    m = session.get_attribution_map(entry, place, setting, *parse_target(request), alive)
    pictures, totals = attributions.draw_thumbnails(m)
    return make_number_response(pictures, {"x-totals": ",".join(map(repr, totals.tolist()))})


def handle_influence(session: Session, request: Request, alive: Alive) -> Response:
    """Return what every word of a text did to the word `token` after position `at`, over all heads."""
    query, entry = request.query_params, get_entry(session, request)
    setting = params.parse_choice(query, "show", ("weight", *attributions.SETTINGS))
    at, token = params.parse_integer(query, "at"), params.parse_integer(query, "token")
    check_index("at", at, entry.get_shape(HeadPlace())[2])
    return make_json_response(session.get_influence(entry, setting, at, token, alive))


def handle_ablation(session: Session, request: Request, alive: Alive) -> Response:
    """Return the next words after `at`, with all heads and without those that `off` names: "3.1,3.4" are two of layer 3."""
    query, entry = request.query_params, get_entry(session, request)
    queries = entry.get_shape(HeadPlace())[2]
    at = params.parse_integer(query, "at", queries - 1)
    check_index("at", at, queries)
    off = params.parse_heads(query, "off") if "off" in query else []
    return make_json_response(session.predict_without_heads(entry, off, at, alive))


def handle_finding(session: Session, request: Request, alive: Alive) -> Response:
    """Return the finding of a recording, of the kind `what` if it is given; null for a recording that is too long."""
    query = request.query_params
    wanted = params.parse_choice(query, "what", FINDINGS) if "what" in query else None
    found = session.get_finding(get_entry(session, request), wanted, alive)
    return make_json_response({"finding": None if found is None else found.to_dict()})


def handle_rollout(session: Session, request: Request, alive: Alive) -> Response:
    """Return a row of the rollout up to a layer, as codes: how much each token counts for a query through all layers before."""
    query, entry = request.query_params, get_entry(session, request)
    if not entry.images:  # a long text would traverse every head of all layers
        raise ConfigError("the rollout is shown for recordings with images; regard.rollout computes others.")
    place, q = params.parse_place(query), params.parse_integer(query, "q")
    check_index("q", q, entry.get_shape(place)[2])
    part = entry.get_layers(place).part
    found = roll_out_until(entry.recording, q, place.layer, place.kind, part)
    return make_binary_response(encode_weights(found[place.b].float()))


def handle_implicit(session: Session, request: Request, alive: Alive) -> Response:
    """Return a picture of a head of a layer without a softmax: signed numbers of 32 bits, the mean or the largest in size."""
    query, entry = request.query_params, get_entry(session, request)
    how: Any = params.parse_choice(query, "how", ("mean", "max"))
    layer, m = get_implicit_map(entry, query)
    size = implicit_pictures.count_pixels(entry.implicit_layers[layer], entry.implicit_pixels)
    return make_number_response(implicit_pictures.draw_implicit(m, *size, how, alive))


def handle_implicit_cell(session: Session, request: Request, alive: Alive) -> Response:
    """Return one entry of a head of a layer without a softmax, with all its digits; null if it is no finite number."""
    query, entry = request.query_params, get_entry(session, request)
    _, m = get_implicit_map(entry, query)
    q, k = (params.parse_integer(query, name) for name in ("q", "k"))
    check_index("q", q, m.shape[2])
    check_index("k", k, m.shape[3])
    return make_json_response({"entry": implicit_pictures.get_entry_number(m, q, k)})


def get_implicit_map(entry: RecordingEntry, query: Mapping[str, str]) -> tuple[int, ImplicitMap]:
    """Return the number of a requested layer without a softmax, and the map (1, 1, q, k) of the requested head."""
    layer, b, head = (params.parse_integer(query, name, 0) for name in ("layer", "b", "head"))
    return layer, entry.get_implicit_map(layer, b, head)


def parse_target(request: Request) -> tuple[int | None, int | None]:
    """Parse the position and the token of a logit, None for the last position and for the likeliest token."""
    query = request.query_params
    at, token = (params.parse_integer(query, name) if name in query else None for name in ("at", "token"))
    return at, token


SELECT_MAP = attrgetter("pyramid.map")  # small, with the denominators of its rows
GENERAL_HANDLERS = {
    "start": Handler(handle_start),
    "recordings": Handler(handle_recordings),
    "example": Handler(handle_example),
}
RECORDING_HANDLERS = {
    "words": Handler(handle_words),
    "thumbs": Handler(handle_thumbnails),
    "tile": Handler(handle_tile, need_one_head),
    "cell": Handler(handle_cell),
    "row": Handler(handle_row),
    "column": Handler(handle_column, need_heads, SELECT_MAP),
    "top": Handler(handle_top, need_axis_heads, SELECT_MAP),
    "steps": Handler(handle_steps),
    "story": Handler(handle_story),
}


LONG_HANDLERS: dict[str, Callable[[Session, Request, Alive], Response]] = {  # these may run the model, or classify its heads
    "settings": handle_settings,
    "target": handle_target,
    "attribution": handle_attribution,
    "attribution_thumbs": handle_attribution_thumbnails,
    "influence": handle_influence,
    "ablation": handle_ablation,
    "finding": handle_finding,
    "rollout": handle_rollout,
    "implicit": handle_implicit,
    "implicit_cell": handle_implicit_cell,
}


def get_entry(session: Session, request: Request) -> RecordingEntry:
    """Return the recording that a request names."""
    return session.get_entry(request.path_params["id"])


def make_json_response(found: Any) -> Response:
    """Make a JSON response."""
    return Response(encode_json(found), media_type="application/json")


def make_number_response(numbers: Tensor, headers: dict[str, str] | None = None) -> Response:
    """Make a response of little-endian float32 numbers, with their shape in a header."""
    data = numbers.cpu().contiguous().numpy().astype("<f4").tobytes()
    shape = ",".join(map(str, numbers.shape))
    return Response(data, media_type="application/octet-stream", headers={"x-shape": shape, **(headers or {})})


def make_weight_response(request: Request, weights: Tensor, seen: Tensor) -> Response:
    """Make a response of weights: codes, or numbers of 32 bits, NaN where nothing is visible, if the request says `exact`."""
    if "exact" in request.query_params:
        return make_number_response(weights.masked_fill(~seen, torch.nan))
    return make_binary_response(exact_weights.encode_visible_weights(weights, seen))


def make_binary_response(codes: Tensor, headers: dict[str, str] | None = None) -> Response:
    """Make a response of little-endian 16-bit codes, with their shape in a header."""
    shape = ",".join(map(str, codes.shape))
    data = codes.cpu().contiguous().numpy().astype("<u2").tobytes()
    return Response(data, media_type="application/octet-stream", headers={"x-shape": shape, **(headers or {})})
