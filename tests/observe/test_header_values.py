"""A bias of products with distances is the same after a file, and a header that describes none is refused."""

import pytest
import torch

from map.test_distance_products import DOUBLE, B, H, K, Q, draw_term
from regard.map.distance_products import DistanceProducts
from regard.map.relative_bias import RelativeBias
from regard.observe.header_values import require_bias
from regard.observe.serialize import NamedTensors
from regard.observe.tensor_store import Store


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
