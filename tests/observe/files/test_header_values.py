"""A bias of products, of groups or of a grid is the same after a file, and a header that describes none is refused."""

import pytest
import torch

from map.test_distance_products import DOUBLE, B, H, K, Q, draw_term
from regard.map.distance_products import DistanceProducts
from regard.map.grid_bias import Grid, GridBias
from regard.map.grouped_bias import GroupedBias
from regard.map.relative_bias import RelativeBias
from regard.observe.files.header_values import require_bias
from regard.observe.files.serialize import NamedTensors
from regard.observe.stored_calls.tensor_store import Store


@pytest.mark.parametrize("rest", ["none", "keys", "distances"])
def test_products_are_the_same_after_a_file_and_a_copy(rest, tmp_path):
    added = {
        "none": None,
        "keys": torch.arange(K, dtype=DOUBLE).view(1, 1, 1, K),
        "distances": RelativeBias(torch.randn(1, H, Q + K - 1, dtype=DOUBLE), Q),
    }[rest]
    bias, packed = DistanceProducts((draw_term(), draw_term(is_of_keys=True, seed=5)), added), NamedTensors()
    header = packed.add(bias)
    for found in (require_bias(header, packed.tensors), Store(folder=tmp_path).copy_tensor(bias)):
        assert isinstance(found, DistanceProducts)
        assert torch.equal(found.to_dense(), bias.to_dense())
        assert found.nbytes == bias.nbytes
    assert sum(x.nbytes for x in packed.tensors.values()) == bias.nbytes


@pytest.mark.parametrize(
    "wrong", ["shape", "index", "a short index", "an index of floats", "another width", "no terms", "a list", "heads"]
)
def test_a_header_of_no_products_is_refused(wrong):
    packed = NamedTensors()
    header = packed.add(DistanceProducts((draw_term(),)))
    vectors, table, index, _ = header["terms"][0]
    if wrong == "shape":
        header["shape"] = [B, H, K, Q]
    elif wrong == "heads":
        header["shape"] = [B, H + 1, Q, K]
    elif wrong == "no terms":
        header["terms"] = []
    elif wrong == "a list":
        header["terms"] = [[vectors, table, index]]
    else:
        changed = {
            "index": (index, packed.tensors[index] + 5),
            "a short index": (index, packed.tensors[index][1:]),
            "an index of floats": (index, packed.tensors[index].double()),
            "another width": (table, packed.tensors[table][..., 1:]),
        }[wrong]
        packed.tensors[changed[0]] = changed[1]
    with pytest.raises((ValueError, TypeError)):
        require_bias(header, packed.tensors)


def draw_groups() -> GroupedBias:
    """A bias of random values of five groups, of which each key has two, the same for all batch rows."""
    return GroupedBias(torch.randn(1, H, Q, 5, dtype=DOUBLE), torch.randint(5, (2, K))).expand(B, H, Q, K)


def test_groups_are_the_same_after_a_file_and_a_copy(tmp_path):
    bias, packed = draw_groups(), NamedTensors()
    header = packed.add(bias)
    for found in (require_bias(header, packed.tensors), Store(folder=tmp_path).copy_tensor(bias)):
        assert isinstance(found, GroupedBias)
        assert torch.equal(found.to_dense(), bias.to_dense())
        assert found.nbytes == bias.nbytes
    assert sum(x.nbytes for x in packed.tensors.values()) == bias.nbytes


@pytest.mark.parametrize("wrong", ["shape", "heads", "a group", "a negative group", "few keys", "floats", "no groups"])
def test_a_header_of_no_groups_is_refused(wrong):
    packed = NamedTensors()
    header = packed.add(draw_groups())
    if wrong in ("shape", "heads"):
        header["shape"] = [B, H, K, Q] if wrong == "shape" else [B, H + 1, Q, K]
    else:
        groups = packed.tensors[header["groups"]]
        packed.tensors[header["groups"]] = {
            "a group": groups + 5,
            "a negative group": groups - 5,
            "few keys": groups[:, 1:],
            "floats": groups.double(),
            "no groups": groups[:0],
        }[wrong]
    with pytest.raises((ValueError, TypeError)):
        require_bias(header, packed.tensors)


def draw_grid() -> GridBias:
    """A bias of some queries and keys of a grid with a class token, the same for all batch rows."""
    grid = Grid(1, 5, 8)
    numbers = torch.randn(1, H, grid.count, dtype=DOUBLE)
    return GridBias(numbers, grid)[:, :, 2:40, 3:].expand(B, H, 38, 38)


def test_a_grid_is_the_same_after_a_file_and_a_copy(tmp_path):
    bias, packed = draw_grid(), NamedTensors()
    header = packed.add(bias)
    for found in (require_bias(header, packed.tensors), Store(folder=tmp_path).copy_tensor(bias)):
        assert isinstance(found, GridBias)
        assert torch.equal(found.to_dense(), bias.to_dense())
        assert found.nbytes == bias.nbytes
    assert sum(x.nbytes for x in packed.tensors.values()) == bias.nbytes


@pytest.mark.parametrize(
    "wrong", ["shape", "heads", "many first tokens", "another grid", "no step", "starts", "few numbers", "axes"]
)
def test_a_header_of_no_grid_is_refused(wrong):
    packed = NamedTensors()
    header = packed.add(draw_grid())
    numbers = packed.tensors[header["numbers"]]
    header |= {
        "shape": {"shape": [B, H, 38, 39]},
        "heads": {"shape": [B, H + 1, 38, 38]},
        "many first tokens": {"grid": [2, 5, 8, 1]},
        "another grid": {"grid": [1, 8, 4, 1]},
        "no step": {"grid": [1, 5, 8, 0]},
        "starts": {"starts": [2, -1]},
    }.get(wrong, {})
    packed.tensors[header["numbers"]] = {"few numbers": numbers[..., 1:], "axes": numbers[None]}.get(wrong, numbers)
    with pytest.raises((ValueError, TypeError)):
        require_bias(header, packed.tensors)
