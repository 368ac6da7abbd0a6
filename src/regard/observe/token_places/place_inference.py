"""Inference of places: which patch or time the tokens of each layer stand for, from the model's modules and its input's size.

A place is inferred only where the number of tokens proves it; where anything is uncertain, there is none.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.observe.recorded_runs.run import IMPLICIT, Run
from regard.observe.token_places.followed_places import find_followed_grids
from regard.observe.token_places.image_tower import Sizes, Tower, find_tower
from regard.observe.token_places.media import Media
from regard.observe.token_places.places import CROSS, EMPTY, AudioFrames, PatchGrid, select_places
from regard.observe.token_places.unpadded_tiles import find_unpadded_tiles

FIRST_NUMBER = re.compile(r"\.\d+(?:\.|$)")
Found = dict[str, Any]  # the places of each layer, by its module's path
Calls = Mapping[tuple[str, str], tuple[Tensor, Tensor]]  # queries and keys of each layer's first call, by its path and kind
SHUFFLING = "mask_ratio"  # an attribute of the config of a model that shuffles its patches
POOLING = ("scale_factor", "downsample_ratio", "mm_tokens_per_image")  # of one that merges squares of patches, row by row
MERGE = "spatial_merge_size"  # an attribute of a config, and of a tower that reads patches in blocks of this side
LEARNED_QUERIES = ("perceiver", "resampler", "qformer")  # in names of classes: their tokens have no places
RATE, WHISPER_SECONDS = 16_000, 0.02  # samples a second of the models of sound in transformers; a frame of Whisper's encoder


def infer_places(modules: Mapping[str, nn.Module], run: Run) -> Any:
    """Return the places of the tokens of a run, as `recording.places` holds them; None if nothing is known."""
    media = run.media
    if media is None:
        return None
    layers = measure_layers(run)
    config = getattr(modules[""], "config", None)
    if media.sound:
        return find_sound(config, media, layers) or None
    found = find_images(modules, media, layers, find_first_calls(run))
    names, _ = Tower(modules, "", 0, 0).special_tokens
    for name, grid in find_followed_grids(run.positions, media).items():
        if media.tokens and (grid is None or name in found):  # of several images beside words more is known than positions
            continue
        if grid is None:
            found.pop(name, None)
        elif not has_same_patches(found.get(name), grid):
            found[name] = replace(grid, names=tuple(names)) if names and grid.start == len(names) else grid
        elif grid.extent is not None:
            found[name] = replace(found[name], extent=grid.extent)
    return shorten_names(found, layers) or None


def has_same_patches(found: Any, grid: PatchGrid) -> bool:
    """Return whether a place is a grid of the same patches as keys, whatever the names of its tokens and its queries."""
    of_keys = (grid.rows, grid.columns, grid.start, grid.order, grid.has_keys)
    return isinstance(found, PatchGrid) and (found.rows, found.columns, found.start, found.order, found.has_keys) == of_keys


def measure_layers(run: Run) -> dict[tuple[str, str], Sizes]:
    """Return the batch rows, queries and keys of each layer in the first forward of the run, by its path and kind.

    The queries and keys of several calls of a visit are added: they pack several images. All are 0 if visits differ.
    """
    visits: dict[tuple[str, str, int], Sizes] = {}
    for (name, kind, visit, _), history in run.histories.items():
        stored = history.stored_calls[0]
        _, q, k = visits.get((name, kind, visit), (0, 0, 0))
        visits[name, kind, visit] = stored.q.shape[0], q + stored.q.shape[2], k + stored.stop - stored.first
    found: dict[tuple[str, str], Sizes] = {}
    for (name, kind, _), sizes in visits.items():
        found[name, kind] = sizes if found.get((name, kind), sizes) == sizes else (0, 0, 0)
    for (name, _, visit, _), implicit in run.implicit_histories.items():
        mechanism = implicit.stored_calls[0].mechanism
        if visit == 0 and isinstance(mechanism, StoredMatrix | ScoredMatrix):  # recurrences may scan an image in any order
            found[name, IMPLICIT] = mechanism.shape[0], mechanism.rows, mechanism.shape[2]
    return found


def find_first_calls(run: Run) -> Calls:
    """Return the queries and keys (b, g, k, d) of the first call of each layer of a run, by its path and kind."""
    found: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for (name, kind, *_), history in run.histories.items():
        found.setdefault((name, kind), (history.stored_calls[0].q, history.keys[0]))
    return found


def find_sound(config: Any, media: Media, layers: Mapping[tuple[str, str], Sizes]) -> Found:
    """Return the frames of the layers that read sound, of Whisper and of models with strided convolutions of samples."""
    kind = getattr(config, "model_type", None)
    strides = getattr(config, "conv_stride", None)
    if kind == "whisper" and media.sound == "input_features":
        return place_frames(AudioFrames(WHISPER_SECONDS), layers)
    if media.sound == "input_values" and isinstance(strides, (list, tuple)):
        squeezed = int(getattr(config, "squeeze_factor", 1) or 1)
        frames = AudioFrames(math.prod(strides) * squeezed / RATE)
        has_decoder = any("decoder" in name.split(".") for name, _ in layers)  # whose own tokens are words
        return place_frames(frames, layers) if has_decoder else {"": frames}
    return {}


def place_frames(frames: AudioFrames, layers: Mapping[tuple[str, str], Sizes]) -> Found:
    """Return the frames of an encoder that hears, if it was recorded, and of the keys of the cross attention to it."""
    encoder = any(kind == "self" and "encoder" in name.split(".") for name, kind in layers)
    cross = any(kind == CROSS for _, kind in layers)
    return {**({"encoder": frames} if encoder else {}), **({CROSS: frames} if cross else {})}


def find_images(modules: Mapping[str, nn.Module], media: Media, layers: Mapping[tuple[str, str], Sizes], calls: Calls) -> Found:
    """Return the grids of the layers that read images, and of the words among which the images stand."""
    config = getattr(modules[""], "config", None)
    if getattr(config, SHUFFLING, None) is not None:
        return {}
    if media.grids:
        found = find_packed(modules, media, layers)
        if not found and count_patches(media) == media.tokens:
            return {}  # the layers of the tower cannot be told from those of the words
        block = read_merge(config)
        sizes = [(rows // block, columns // block) for rows, columns in select_row_grids(media)]
        return found | find_image_words(media, layers, found, sizes)
    tower = find_tower(modules, media, {name for name, _ in layers})
    if tower is None:
        return {}
    found = find_tower_grids(tower, media, layers, calls)
    own = {name for name, _ in layers if tower.has_layer(name)}
    tiled = find_unpadded_tiles(config, media, (tower.rows, tower.columns))
    if tiled:
        return found | place_words(media, layers, own, tiled)
    found |= find_image_words(media, layers, own, find_merged_sizes(config, modules, media, tower))
    move = partial(replace, extent=tower.extent)
    return {name: [*map(move, one)] if isinstance(one, list) else move(one) for name, one in found.items()}


def find_tower_grids(tower: Tower, media: Media, layers: Mapping[tuple[str, str], Sizes], calls: Calls) -> Found:
    """Return the grid of each layer of a tower, and of each layer of cross attention to its patches.

    Keys of cross attention that are as many as the tokens of a text, or as what an earlier layer's queries made of the patches
    (all but a class token), may be these. Patches that look at other tokens remain patches.
    """
    found: Found = {}
    others = {media.tokens}
    for (name, kind), sizes in layers.items():
        grid = None
        if kind == CROSS:
            grid = None if sizes[2] in others else tower.find_grid(sizes[2])
            others |= {sizes[1], sizes[1] - 1} if grid is not None and sizes[1] > 1 else set()
            tiles = tower.find_tiles(sizes[2], media.images // max(sizes[0], 1)) if grid is None else []
            if tiles and sizes[2] not in others:
                found[name] = tiles
        elif tower.has_layer(name) and sizes[0] == media.images and sizes[1] == sizes[2]:
            q, k = calls.get((name, kind), (None, None))
            is_one_call = k is None or k.shape[2] == sizes[2]
            if is_one_call and (q is None or k is None or not tower.attends_over_channels(name, q.shape[1], k)):
                grid = tower.find_grid(sizes[2])
        if grid is not None:
            found[name] = grid
    return found


def shorten_names(found: Found, layers: Mapping[tuple[str, str], Sizes]) -> Found:
    """Return the places under the paths before the first number, where all layers that such a path names have the same.

    Otherwise they stay under the path of each layer.
    """
    groups: dict[str, list[str]] = {}
    for name in found:
        groups.setdefault(FIRST_NUMBER.split(name)[0], []).append(name)
    short: Found = {}
    for path, names in groups.items():
        same = all(found[name] == found[names[0]] for name in names)
        short |= {path: found[names[0]]} if same and len(names) > 1 else {name: found[name] for name in names}
    kept = all(select_places(short, kind, name) == select_places(found, kind, name) for name, kind in layers)
    return short if kept else found


def find_packed(modules: Mapping[str, nn.Module], media: Media, layers: Mapping[tuple[str, str], Sizes]) -> Found:
    """Return the grids of layers that read the patches of all images in one sequence, in blocks that are merged later."""
    config = getattr(modules[""], "config", None)
    vision: Any = getattr(config, "vision_config", config)
    block, total = read_merge(config), count_patches(media)
    starts = accumulate((rows * columns for rows, columns in media.grids), initial=0)
    if block < 2:
        return {}
    window = getattr(vision, "window_size", None) if hasattr(vision, "fullatt_block_indexes") else None
    cells = 0 if window is None else window // block // vision.patch_size
    grids = [order_packed(*sizes, block, cells, start) for sizes, start in zip(media.grids, starts, strict=False)]
    return {
        name: grids
        for (name, kind), sizes in layers.items()
        if kind == "self" and sizes == (1, total, total) and reads_blocks(modules, name, block)
    }


def select_row_grids(media: Media) -> tuple[tuple[int, int], ...]:
    """Return the sizes of the images of a batch row if all rows have the same, else those of all images."""
    count = len(media.grids) // media.rows
    own = media.grids[:count]
    return own if own * media.rows == media.grids else media.grids


def count_patches(media: Media) -> int:
    """Return the number of patches of all images that are given as patches."""
    return sum(rows * columns for rows, columns in media.grids)


def reads_blocks(modules: Mapping[str, nn.Module], name: str, block: int) -> bool:
    """Return whether a layer is in a tower that states the side of the blocks in which it reads patches.

    A tower that does not state it reads them row by row, and a module behind it merges them (PaddleOCR-VL, HunYuan-VL).
    """
    components = name.split(".")
    around = [modules.get(".".join(components[:n])) for n in range(len(components))]
    return any(
        getattr(one, MERGE, None) == block and not hasattr(getattr(one, "config", None), "vision_config") for one in around
    )


def order_packed(rows: int, columns: int, block: int, window: int, start: int) -> PatchGrid:
    """Return the grid of an image in a packed sequence: in blocks, in windows of window x window blocks unless that is 0."""
    grid = PatchGrid.from_blocks(rows, columns, block, start)
    if not window:
        return grid
    windows = PatchGrid.from_windows(rows // block, columns // block, window).order or ()
    blocks = [one for cells in windows for one in cells if one != EMPTY]
    (order,) = grid.order or ((),)
    return PatchGrid(rows, columns, start, (tuple(order[block**2 * one + n] for one in blocks for n in range(block**2)),))


def read_merge(config: Any) -> int:
    """Return the side of the square of patches that a model with packed images merges to one token; 1 if it merges none."""
    return int(getattr(getattr(config, "vision_config", config), MERGE, 1) or 1)


def find_merged_sizes(config: Any, modules: Mapping[str, nn.Module], media: Media, tower: Tower) -> list[tuple[int, int]]:
    """Return the rows and columns of each image of a batch row among the words; empty if its tokens are not a grid."""
    count = media.images // media.rows
    names = {type(module).__name__.lower() for module in modules.values()}
    if not count or media.images % media.rows or any(one in name for name in names for one in LEARNED_QUERIES):
        return []
    merges = any(getattr(config, name, None) is not None for name in POOLING)
    for factor in range(1, min(tower.rows, tower.columns) + 1 if merges else 2):
        rows, columns = tower.rows // factor, tower.columns // factor
        whole = tower.rows % factor == 0 and tower.columns % factor == 0
        if whole and rows * columns * count == len(media.image_tokens):
            return [(rows, columns)] * count
    return []


def find_image_words(media: Media, layers: Mapping[tuple[str, str], Sizes], others: Any, sizes: list[tuple[int, int]]) -> Found:
    """Return the grids of the images in the layers of a language model, outside the layers that read images."""
    grids = list(split_image_tokens(media.image_tokens, sizes))
    if not grids or len(grids) < len(sizes):
        return {}
    return place_words(media, layers, others, grids)


def place_words(media: Media, layers: Mapping[tuple[str, str], Sizes], others: Any, grids: list[PatchGrid]) -> Found:
    """Return the grids of the images for each layer of self-attention to all tokens of the text, outside the other layers."""
    return {
        name: grids[0] if len(grids) == 1 else grids
        for (name, kind), (_, q, k) in layers.items()
        if kind == "self" and name not in others and (q, k) == (media.tokens, media.tokens)
    }


def split_image_tokens(places: tuple[int, ...], sizes: list[tuple[int, int]]) -> Iterator[PatchGrid]:
    """Generate the grid of each image from the tokens of all of them; ends where the tokens of one are not consecutive."""
    if len(places) != sum(rows * columns for rows, columns in sizes):
        return
    first = 0
    for rows, columns in sizes:
        own = places[first : first + rows * columns]
        if own != tuple(range(own[0], own[0] + len(own))):
            return
        yield PatchGrid(rows, columns, own[0])
        first += rows * columns
