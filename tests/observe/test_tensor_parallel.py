"""The heads that two ranks recorded, joined: the recording of the model that was not split."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL
from regard import ConfigError
from regard.observe import record
from regard.observe.tensor_parallel import join_heads

B, T, C, H, G, D = 2, 7, 12, 6, 2, 5


class Heads(nn.Module):
    """Some of the heads of an attention, with a table of what each of them may see."""

    def __init__(self, weights: dict[str, Tensor], table: Tensor) -> None:
        super().__init__()
        self.weights, self.table = weights, table

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, self.weights[name]) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.table, enable_gqa=True)


class Model(nn.Module):
    """An attention that is split among ranks, after one that each of them runs whole."""

    def __init__(self, split: nn.Module, whole: nn.Module) -> None:
        super().__init__()
        self.whole, self.split = whole, split

    def forward(self, x: Tensor) -> Tensor:
        return self.split(x + self.whole(x)[:, 0, :, :1])


def build_models(table: Tensor) -> list[Model]:
    """The whole model, and the two parts of it."""
    torch.manual_seed(3)
    weights = {name: 0.3 * torch.randn(H if name == "q" else G, C, D, dtype=torch.float64) for name in "qkv"}
    common = Heads({name: torch.randn(G, C, D, dtype=torch.float64) for name in "qkv"}, torch.ones(T, T).tril().bool())
    parts = []
    for chosen in (slice(None), slice(0, 1), slice(1, 2)):
        own = {name: x.unflatten(0, (G, -1))[chosen].flatten(0, 1) for name, x in weights.items()}
        mask = table if table.dim() == 2 else table.unflatten(1, (G, -1))[:, chosen].flatten(1, 2)
        parts.append(Model(Heads(own, mask), common))
    return parts


TABLES = {
    "a rule": torch.ones(T, T).tril().bool(),
    "a table of heads": torch.rand(1, H, T, T, generator=torch.Generator().manual_seed(5)) < 0.6,
    "a bias of heads": torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(5), dtype=torch.float64),
}


@pytest.mark.parametrize("table", TABLES)
def test_the_heads_of_two_ranks_are_those_of_the_whole_model(table):
    recordings = []
    for model in build_models(TABLES[table]):
        torch.manual_seed(4)
        with record(model, keep="values") as recording:
            for _ in range(2):
                model(torch.randn(B, T, C, dtype=torch.float64))
        recordings.append(recording)
    whole, *parts = recordings
    joined = join_heads(parts)
    assert repr(joined) == repr(whole)
    assert {call.kind for call in whole.calls} == {"self"}
    for run, expected in zip(joined.runs, whole.runs, strict=True):
        for layer, kind in {(call.name, call.kind) for call in expected.softmax_calls}:
            joined_map, map_of_all = (one.map(layer, kind=kind).dense() for one in (run, expected))
            torch.testing.assert_close(joined_map, map_of_all, rtol=0, atol=EQUAL)  # a product of fewer heads rounds otherwise
            torch.testing.assert_close(run.values(layer, kind), expected.values(layer, kind), rtol=0, atol=EQUAL)
            assert run.heads(layer, kind) == expected.heads(layer, kind)


def test_ranks_that_recorded_other_calls_are_not_joined():
    first, other, _ = build_models(TABLES["a rule"])
    x = torch.randn(B, T, C, dtype=torch.float64)
    recordings = []
    for model, runs in ((first, 1), (other, 2)):
        with record(model) as recording:
            for _ in range(runs):
                model(x)
        recordings.append(recording)
    with pytest.raises(ConfigError, match="the ranks recorded different calls"):
        join_heads(recordings)
