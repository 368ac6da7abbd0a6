import pytest
import torch

from regard import Causal, Given
from regard.show.page.select_head import select_head
from show.page.server_client import in_steps, rows_and_keys

B, H, G, Q, K, D = 2, 4, 2, 5, 7, 3


def with_everything():
    """A layer whose heads differ in their tables, their biases and their sinks."""
    generator = torch.Generator().manual_seed(0)
    q, k, bias, sinks = (
        torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((B, H, Q, D), (B, G, K, D), (1, H, Q, K), (H,))
    )
    table = torch.rand(B, H, Q, K, generator=generator) < 0.7
    return rows_and_keys(q, k, Causal() & Given(table), bias=bias, sinks=sinks, offset=K - Q)


@pytest.mark.parametrize("recording", [with_everything(), in_steps()], ids=["one call", "many calls"])
def test_a_head_alone_is_that_head_of_the_layer(recording):
    for layer in range(len(recording.layers())):
        whole, values = recording.map(layer), recording.values(layer)
        for head in range(H):
            one = select_head(recording, "self", None, layer, head)
            assert one.map(layer).shape[1] == 1
            torch.testing.assert_close(one.map(layer)[:, 0], whole[:, head], rtol=0, atol=1e-12)
            assert one.heads(layer) == (head,)
            if values is not None:
                assert torch.equal(one.values(layer)[:, 0], values[:, head * G // H])
