"""The row of a map as numbers on the patches of an image, for pictures of one query."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, OutOfRangeError
from regard.mechanism.arguments import check_choice, check_index, check_instance, check_integer, describe_value
from regard.observe import Recording
from regard.observe.attribution import Attribution
from regard.observe.rollout import roll_out_until
from regard.observe.token_places.image_tower import CLASS_TOKEN
from regard.observe.token_places.places import EMPTY, HINT, PatchGrid, list_places
from regard.show.axis_words import find_words, match_words
from regard.show.terminal import truncate_end

QUANTITIES = ("weights", "rollout")
MAX_OTHERS = 3  # tokens that are no patches, named one by one
LONGEST = 12  # characters of their names
Query = int | tuple[int, int]  # a token, or the row and the column of a patch


@dataclass(frozen=True, eq=False)
class PatchWeights:
    """Numbers of one query: of the patches of an image (rows, columns), NaN where it sees none, and of the other tokens.

    `undefined` is the number of keys whose number is itself NaN.
    """

    grid: PatchGrid
    values: Tensor
    others: tuple[tuple[str, float], ...]
    query: str
    patch: tuple[int, int] | None  # row and column of the query, if it is a patch
    what: str  # the numbers, in words
    undefined: int = 0


def find_patch_layers(recording: Recording, kind: str, part: str | None, image: int = 0) -> list[int]:
    """Return the layers of a kind and a part whose keys are patches of an image.

    Raises ConfigError if there are none.
    """
    layers = recording.layers(kind, part)
    found = [n for n in range(len(layers)) if has_patches(recording, n, kind, part, image)]
    if not found:
        known = "" if recording.places is None else f" Known are the places of {', '.join(list_named(recording))}."
        raise ConfigError(f"the keys of no layer of {kind} attention are known as patches of image {image}.{known} {HINT}")
    return found


def require_patches(recording: Recording) -> None:
    """Raise ConfigError if the keys of no layer, of any kind and part, are known as patches of an image."""
    if not any(isinstance(one, PatchGrid) and one.has_keys for one in list_places(recording.places)):
        raise ConfigError(f"an image is shown where tokens are known as its patches, and none are. {HINT}")


def list_named(recording: Recording) -> list[str]:
    """Return the names of the modules whose places are known."""
    places = recording.places
    return [name or "all modules" for name in places] if isinstance(places, Mapping) else ["all modules"]


def has_patches(recording: Recording, layer: int, kind: str, part: str | None, image: int) -> bool:
    """Return whether the keys of a layer are patches of an image."""
    keys = recording.axis_places(layer, kind, part)[1]
    return 0 <= image < len(keys) and isinstance(keys[image], PatchGrid)


def compute_patch_weights(
    recording: Recording,
    layer: int | str | None = None,
    head: int | None = None,
    query: Query | None = None,
    *,
    kind: str = "self",
    part: str | None = None,
    row: int = 0,
    image: int = 0,
    of: str | Attribution = "weights",
) -> PatchWeights:
    """Compute what a query looks at in an image: the weights of a head, or the mean over the heads of a layer.

    layer is by default the last whose keys are patches. query is the number of a token, or the row and column of a patch; by
    default the class token if there is one, the middle patch in an image alone, and the last token of a text. of="rollout" is
    the rollout up to the layer, an Attribution the pull of its number, summed over the heads. row is the batch row, image the
    number of the image. Raises ConfigError if nothing is known of the patches, ShapeError if they do not fit the map.
    """
    check_instance("recording", recording, Recording, "Record a model with regard.record(model).")
    if layer is None:
        layer = find_patch_layers(recording, kind, part, check_integer("image", image))[-1]
    asking, answering = recording.axis_places(layer, kind, part)
    grids = [one for one in answering if isinstance(one, PatchGrid)]
    if not grids:
        raise ConfigError(f"the keys of layer {layer} are not known as patches of an image. {HINT}")
    image = check_index("image", image, len(grids), "the images")
    grid = grids[image]
    shape = recording.map(layer, kind=kind, part=part).shape
    row = check_index("row", row, max(shape[0] // grid.windows, 1), "the batch")
    cells = grid.locate_tokens(shape[3])
    if query is None:
        query = (
            choose_query(grids, image, shape[3]) if asking and shape[2] == shape[3] else -1
        )  # those of a cache are no queries
    window, token, patch = find_query(query, grid, shape[2:], bool(asking), kind)
    if patch is None and window == 0 and asking:
        number = int(cells[0, token + shape[3] - shape[2]])
        patch = None if number == EMPTY else divmod(number, grid.columns)
    values, what = compute_row(recording, layer, head, (kind, part), row * grid.windows + window, token, of)
    label = name_query(recording, layer, kind, part, row, token, patch)
    words = match_words(recording.words(layer, kind, part)[1], row, shape[3])
    beside = {f"image {n}": one.locate_tokens(shape[3])[0] for n, one in enumerate(grids) if n != image and one.windows == 1}
    return lay_on_grid(grid, cells[window], values, words, (label, patch), what, beside)


def choose_query(grids: list[PatchGrid], image: int, size: int) -> Query:
    """Return the query that is shown first, of self attention to `size` tokens in which the images have these grids.

    It is the class token if there is one, the middle patch where all tokens are patches, and the last token of a text.
    """
    grid = grids[image]
    end = grid.find_start(size) + grid.length
    are_patches = size == sum(one.length for one in grids) or grid.windows > 1
    if are_patches or (grid.names and grid.names[0] != CLASS_TOKEN):
        return grid.rows // 2, grid.columns // 2
    return 0 if grid.names or (len(grids) == 1 and end == size) else -1


def find_query(query: Any, grid: PatchGrid, size: tuple[int, int], has_patches: bool, kind: str) -> tuple[int, int, Any]:
    """Return the window and the number of a query, and its patch if it was given as one.

    Raises ConfigError, or OutOfRangeError if it was not recorded as a query.
    """
    q, k = size
    if isinstance(query, tuple) and len(query) == 2:
        if not has_patches:
            raise ConfigError(f"the queries of {kind} attention are not patches: pass the number of a token, got {query}.")
        window, token = grid.find_token(*query, k)
        if token < k - q:
            raise ConfigError(f"patch {query} was recorded only as a key: the recorded queries are the last {q} of {k} tokens.")
        return window, token - (k - q), (query[0] % grid.rows, query[1] % grid.columns)
    if isinstance(query, bool) or not isinstance(query, int):
        raise ConfigError(
            f"query must be the number of a token, or the row and column of a patch; got {describe_value(query)}."
        )
    if grid.windows > 1:
        raise ConfigError(f"a query among {grid.windows} windows must be a patch, (row, column); got {query}.")
    if has_patches and query >= 0:
        if query < k - q:
            raise OutOfRangeError(
                f"token {query} was recorded only as a key: the recorded queries are the last {q} of {k} tokens."
            )
        query = check_index("query", query, k, "the text") - (k - q)
    return 0, check_index("query", query, q, "the recorded queries"), None


def compute_row(
    recording: Recording, layer: int | str, head: int | None, kind_part: tuple[str, str | None], batch: int, token: int, of: Any
) -> tuple[Tensor, str]:
    """Return the numbers (k,) of a query, and what they are."""
    kind, part = kind_part
    label = "mean over the heads" if head is None else f"head {head}"
    if isinstance(of, Attribution):
        pulls = of.map(layer, head, attention=kind, part=part)[batch, :, token]
        return pulls.sum(0), f"pull, layer {layer}, {'all heads' if head is None else label}"
    if check_choice("of", of, QUANTITIES) == "rollout":
        if head is not None:
            raise ConfigError(f"a rollout is over all heads: leave out head, got {head}.")
        names = recording.layers(kind, part)
        last = names.index(layer) if isinstance(layer, str) else range(len(names))[layer]
        return roll_out_until(recording, token, last, kind, part)[batch], f"rollout up to layer {last}"
    weights = recording.map(layer, head, kind, part)[batch, :, token].mean(0)
    return weights, f"layer {layer}, {label}"


def lay_on_grid(
    grid: PatchGrid,
    cells: Tensor,
    values: Tensor,
    words: list[str],
    query: tuple[str, tuple[int, int] | None],
    what: str,
    beside: Mapping[str, Tensor],
) -> PatchWeights:
    """Return numbers (k,) of keys on the grid, given the patch of each key; a weight of exactly 0 is of a key not seen.

    beside: the patch of each key in the grids of the other images, by their names. Their numbers are added up.
    """
    found = values.detach().double().cpu()
    picture = torch.full((grid.rows * grid.columns,), torch.nan, dtype=torch.float64)
    picture[cells[cells != EMPTY]] = found[cells != EMPTY].where(found[cells != EMPTY] != 0, torch.nan)
    names = grid.name_tokens(len(cells))
    is_patch = torch.stack([cells != EMPTY, *(one != EMPTY for one in beside.values())]).any(0)
    rest = (~is_patch).nonzero().flatten().tolist() if grid.windows == 1 else []
    others = [(name, float(found[one != EMPTY].sum())) for name, one in beside.items()]
    others += [(names[n] if words[n] == str(n) else f"“{words[n].strip()}”", float(found[n])) for n in rest]
    return PatchWeights(grid, picture.view(grid.rows, grid.columns), tuple(others), *query, what, int(found.isnan().sum()))


def name_query(
    recording: Recording, layer: int | str, kind: str, part: str | None, row: int, token: int, patch: tuple[int, int] | None
) -> str:
    """Return the name of a query: its row and column, its word, or its number."""
    if patch is not None:
        return f"patch {patch[0]},{patch[1]}"
    q, k = recording.map(layer, kind=kind, part=part).shape[2:]
    asking, keys = recording.axis_places(layer, kind, part)
    size = k if asking else q
    words = find_words(recording.words(layer, kind, part)[kind != "cross" and bool(asking)], row, size)
    number = token + k - q if asking else token
    if words is not None:
        return f"“{words[number].strip()}”, token {number}"
    return name_patch(keys, number, k) if asking and isinstance(keys[0], PatchGrid) else f"token {number}"


def name_patch(grids: list[Any], number: int, size: int) -> str:
    """Return the name of a token by its place in the grids of the images: of several, the image of a patch is named too."""
    for image, grid in enumerate(grids):
        if grid.windows == 1 and int(grid.locate_tokens(size)[0, number]) != EMPTY:
            return str(grid.name_tokens(size)[number]) + (f" of image {image}" if len(grids) > 1 else "")
    return str(grids[0].name_tokens(size)[number])


def describe_others(one: PatchWeights) -> str:
    """Describe the numbers of the tokens that are no patches; of many the largest, and how many others there are."""
    order = sorted(one.others, key=lambda other: -abs(other[1]))
    shown = one.others if len(one.others) <= MAX_OTHERS else order[: MAX_OTHERS - 1]
    parts = [f"{truncate_end(name, LONGEST)} {value:.2g}" for name, value in shown]
    rest = len(one.others) - len(shown)
    return ", ".join([*parts, *([f"{rest} other tokens"] if rest else [])])


def describe_unseen(one: PatchWeights) -> str:
    """Return how many patches a query does not see, which have no color; "" if it sees all, or if numbers are undefined."""
    unseen = int(one.values.isnan().sum())
    if not unseen or one.undefined:
        return ""
    return f"{unseen:,} of {one.values.numel():,} patches are not seen: no color"


def describe_undefined(one: PatchWeights) -> str:
    """Return how many numbers of a query are NaN, which look like those of patches that it does not see; "" if none is."""
    if not one.undefined:
        return ""
    return f"{one.undefined:,} number{'s' * (one.undefined > 1)} of this query {'are' if one.undefined > 1 else 'is'} NaN"
