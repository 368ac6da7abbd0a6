import pytest
import torch

import regard
from regard import AudioFrames, ConfigError, OutOfRangeError, PatchGrid, ShapeError
from regard.observe.token_places.places import deserialize_places, select_places, serialize_places
from regard.show.patch_weights import compute_patch_weights


def test_the_patches_are_the_last_tokens_unless_their_start_is_given():
    assert PatchGrid(2, 3).locate_tokens(8).tolist() == [[-1, -1, 0, 1, 2, 3, 4, 5]]
    assert PatchGrid(2, 3, start=1).locate_tokens(9).tolist() == [[-1, 0, 1, 2, 3, 4, 5, -1, -1]]


@pytest.mark.parametrize("grid", [PatchGrid(5, 7, 2), PatchGrid.from_blocks(6, 4, 2, 3), PatchGrid.from_windows(5, 7, 3, 1)])
def test_every_patch_is_one_token_and_is_found_there(grid):
    size = grid.length if grid.windows > 1 else grid.length + 11
    located = grid.locate_tokens(size)
    for row in range(grid.rows):
        for column in range(grid.columns):
            window, token = grid.find_token(row, column, size)
            assert located[window, token] == row * grid.columns + column
    assert (located >= 0).sum() == grid.rows * grid.columns


def test_blocks_hold_neighbours_and_come_row_by_row():
    grid = PatchGrid.from_blocks(2, 6, 2)
    assert grid.locate_tokens(12)[0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


@pytest.mark.parametrize(("rows", "columns", "window", "shift"), [(7, 7, 7, 0), (8, 12, 4, 2), (5, 7, 3, 1), (3, 11, 2, 0)])
def test_windows_are_those_of_swin(rows, columns, window, shift):
    import torch.nn.functional as F
    from transformers.models.swin.modeling_swin import window_partition

    patches = torch.arange(1.0, rows * columns + 1).view(1, rows, columns, 1)
    padded = F.pad(patches, (0, 0, 0, -columns % window, 0, -rows % window))
    theirs = window_partition(padded.roll((-shift, -shift), (1, 2)), window).flatten(1).long() - 1
    assert PatchGrid.from_windows(rows, columns, window, shift).locate_tokens(window**2).equal(theirs)


@pytest.mark.parametrize(("grid", "size"), [(PatchGrid(3, 5), 14), (PatchGrid(3, 5), 32), (PatchGrid(3, 5, start=4), 18)])
def test_an_axis_that_does_not_fit_is_refused_with_both_sizes(grid, size):
    with pytest.raises(ShapeError, match=rf"3 x 5 patches take 15 tokens.*the axis has {size} tokens.*recording\.places"):
        grid.locate_tokens(size)


@pytest.mark.parametrize("patch", [(3, 0), (0, 5), (-4, 0), (True, 0), (0.5, 0)])
def test_a_patch_outside_the_grid_is_refused(patch):
    with pytest.raises(OutOfRangeError, match="from 0 to"):
        PatchGrid(3, 5).find_token(*patch, 15)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PatchGrid(0, 5), "rows"),
        (lambda: PatchGrid(2, 2, start=-1), "start"),
        (lambda: PatchGrid(2, 2, extent=(0, 0, 0, 1)), "extent must be top, left, bottom and right"),
        (lambda: PatchGrid(2, 2, order=[0, 1, 2, 2]), "each of the 4 patches once"),
        (lambda: PatchGrid(2, 2, order=[[0, 1, 2], [3]]), "windows of one length"),
        (lambda: PatchGrid.from_blocks(3, 4, 2), "divide both sides"),
        (lambda: AudioFrames(0.0), "above 0"),
    ],
)
def test_places_that_contradict_themselves_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_tokens_are_named_by_their_row_and_column():
    assert PatchGrid(1, 2, names=("class token",)).name_tokens(3) == ["class token", "patch 0,0", "patch 0,1"]
    assert PatchGrid(1, 2, start=1).name_tokens(4) == ["token 0", "patch 0,0", "patch 0,1", "token 3"]


def test_frames_of_sound_start_one_after_another():
    assert AudioFrames(0.25).locate_tokens(4).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_the_longest_name_of_a_module_counts_and_cross_attention_has_its_own():
    a, b, c = PatchGrid(1, 2), PatchGrid(1, 3), AudioFrames(0.5)
    places = {"": a, "tower": b, "cross": c}
    assert select_places(places, "self", "model.tower.layers.0") == [b]
    assert select_places(places, "self", "model.towers.0") == [a]
    assert select_places(places, "cross", "model.tower.layers.0") == [c]
    assert select_places([a, b], "self", "any") == [a, b]
    assert select_places({"tower": b}, "self", "text.0") == []


def test_places_are_set_by_hand_in_one_line_and_stay_in_a_file(tmp_path):
    layer = regard.MultiHeadAttention(4, 6, 9, 0.0, 2)
    with regard.record(layer) as recording:
        layer(torch.randn(1, 7, 4))
    assert recording.places is None
    named = {"": PatchGrid.from_blocks(2, 2, 2), "cross": AudioFrames(0.5)}
    for places in (PatchGrid(2, 3), [PatchGrid(1, 2, 0), PatchGrid(2, 2, 3)], named):
        recording.places = places
        recording.save(tmp_path / "one.reg")
        assert regard.load(tmp_path / "one.reg").places == places
    recording.places = PatchGrid(2, 3)
    assert recording.axis_places(0) == ([PatchGrid(2, 3)], [PatchGrid(2, 3)])


@pytest.mark.parametrize(("has_keys", "written"), [(True, None), (False, False)])
def test_earlier_code_reads_a_grid_of_keys(has_keys, written):
    grid = PatchGrid(2, 3, 0, has_keys=has_keys, extent=(0, 0, 1, 1) if has_keys else (0, -0.1, 0.9, 1.2))
    found = serialize_places(grid)
    assert found.get("has_keys") is written  # which earlier code has no argument for
    assert ("extent" in found) is not has_keys
    assert deserialize_places(found) == grid


@pytest.mark.parametrize("places", [7, "14x14", [], [7], {"a": 7}, {3: PatchGrid(1, 1)}, [AudioFrames(0.1)]])
def test_what_is_no_place_is_refused(places):
    with pytest.raises(ConfigError, match=r"regard\.PatchGrid"):
        regard.Recording().places = places


def test_a_grid_of_queries_alone_is_that_of_the_latents_that_look_at_words(tmp_path):
    latents = PatchGrid(2, 3, 0, has_keys=False)
    with torch.no_grad(), regard.record(model := LatentsAndWords()) as recording:
        model(torch.randn(1, 6, 4), torch.randn(1, 5, 4))
    recording.places = {"cross": latents}
    recording.save(tmp_path / "one.reg")
    for one in (recording, regard.load(tmp_path / "one.reg")):
        assert one.axis_places(0, "cross") == ([latents], [])
    with pytest.raises(ConfigError, match="known as patches"):
        compute_patch_weights(recording, 0, kind="cross")
    with pytest.raises(ConfigError, match="none are"):
        regard.page(recording, tmp_path / "page.html", image=torch.rand(1, 3, 8, 12))
    with pytest.raises(ConfigError, match="of queries or of keys"):
        PatchGrid(2, 3, has_queries=False, has_keys=False)


class LatentsAndWords(torch.nn.Module):
    """Cross attention of latents to words."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, latents, words):
        return self.attend(latents, words, words)[0]


def test_tiles_are_put_together_row_by_row_with_what_stands_between_them():
    tiles = [PatchGrid(2, 3, start=1 + 8 * n) for n in range(4)]  # two other tokens behind each
    grid = PatchGrid.from_tiles(tiles, 2)
    assert (grid.rows, grid.columns, grid.start) == (4, 6, 1)
    cells = grid.locate_tokens(40)[0]
    for row in range(4):
        for column in range(6):
            tile, inside = row // 2 * 2 + column // 3, row % 2 * 3 + column % 3
            assert grid.find_token(row, column, 40) == (0, 1 + 8 * tile + inside)
    assert int((cells == -1).sum()) == 40 - 24
    merged = PatchGrid.from_tiles([PatchGrid.from_blocks(2, 2, 2, 0), PatchGrid(2, 2, 4, (3, 2, 1, 0))], 2)
    assert merged.order == ((0, 1, 4, 5, 7, 6, 3, 2),)


@pytest.mark.parametrize(
    "tiles",
    [
        [],
        [PatchGrid(2, 3, 0)] * 3,
        [PatchGrid(2, 3, 0), PatchGrid(3, 2, 6)],
        [PatchGrid(2, 3), PatchGrid(2, 3, 6)],
        [PatchGrid(2, 3, 0), 7],
    ],
)
def test_tiles_that_do_not_fill_rows_of_one_size_are_refused(tiles):
    with pytest.raises(ConfigError, match=r"tiles must be grids of one size on one axis, .*, that fill rows of 2"):
        PatchGrid.from_tiles(tiles, 2)
