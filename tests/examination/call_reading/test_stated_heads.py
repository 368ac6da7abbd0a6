import pytest
from torch import nn

from regard.examination.call_reading.stated_heads import describe_exchanged_axes
from regard.observe.interception.head_counts import HEADS


@pytest.mark.parametrize("name", HEADS)
def test_every_attribute_that_recordings_read_the_number_of_heads_from_is_one_to_examine(name):
    layer = nn.Module()
    setattr(layer, name, 4)
    layer.head_dim = 3
    assert describe_exchanged_axes(layer, 3, 4) == f"there are 3 heads of width 4, though {name} is 4 and head_dim is 3"
    assert not describe_exchanged_axes(layer, 4, 3)
