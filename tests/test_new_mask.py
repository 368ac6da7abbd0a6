"""A mask that is defined here, in a test file, works in every part: kernels, maps, recordings, files, pictures, examine."""

from dataclasses import dataclass

import pytest
import torch

import regard
from regard import AttentionMap, Causal, Padding, attend, attention
from regard.mechanism import Mask, choose
from regard.mechanism.spans import clamp_span

B, H, T, D = 2, 3, 41, 8


@dataclass(frozen=True)
class Dilated(Mask):
    """A query sees every n-th key back from its own position."""

    n: int

    def can_see(self, b, h, i, j, offset=0):
        position = i + (offset.view(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset)
        return (j <= position) & ((position - j) % self.n == 0)

    def find_possible_keys(self, rows, keys):
        return clamp_span(0, rows.last_position + 1, keys)

    def find_certain_keys(self, rows, keys):
        return ()


class Layer(torch.nn.Module):
    """Three heads of dilated attention."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(H * D, 3 * H * D)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, Dilated(3)).transpose(1, 2).flatten(2)


def inputs(dtype=torch.float64, tokens=T):
    torch.manual_seed(0)
    return [torch.randn(B, H, tokens, D, dtype=dtype) for _ in range(3)]


def make_expected_table(tokens=T):
    return torch.tensor([[j <= i and (i - j) % 3 == 0 for j in range(tokens)] for i in range(tokens)])


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"scale": 0.0}, {"sinks": torch.zeros(H, dtype=torch.float64)}, {"offset": 5}], ids=str
)
def test_every_kernel_computes_it(options):
    q, k, v = inputs()
    for mask in (Dilated(3), Dilated(3) & Padding([7, 30]), ~Dilated(3), Causal() & ~Dilated(2)):
        kernel = choose(q, k, v, mask, **options).kernel
        torch.testing.assert_close(attention(q, k, v, mask, **options), attend(q, k, v, mask, **options).context, msg=kernel)


def test_its_table_and_its_map_are_those_of_its_meaning():
    q, k, _ = inputs()
    assert torch.equal(Dilated(3).table(T, T), make_expected_table())
    weights = attend(q, k, k, Dilated(3)).weights
    m = AttentionMap(q, k, Dilated(3))
    torch.testing.assert_close(m.dense(), weights)
    torch.testing.assert_close(m.received(), weights.sum(2))
    torch.testing.assert_close(
        m.pooled(4, 4, "max"), AttentionMap(q, k, regard.Given(make_expected_table())).pooled(4, 4, "max")
    )
    assert torch.equal((m.dense() > 0)[0, 0], make_expected_table())


@pytest.mark.slow
def test_it_is_recorded_saved_loaded_and_drawn(tmp_path):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(B, T, H * D)
    with regard.record(layer) as recording, torch.no_grad():
        layer(x)
    recording.tokens = [str(n) for n in range(T)]
    assert recording.missed == []
    assert torch.equal(recording.map(0).dense()[0, 0] > 0, make_expected_table())
    recording.save(tmp_path / "run.reg")
    loaded = regard.load(tmp_path / "run.reg")
    torch.testing.assert_close(loaded.map(0).dense(), recording.map(0).dense())
    assert Dilated(2).draw(3, 3) == "■ · ·\n· ■ ·\n■ · ■"
    regard.page(loaded, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert len(regard.heads(loaded)) == H


@pytest.mark.slow
def test_examine_accepts_it_and_finds_what_differs():
    def compute_dilated(q, k, v):
        return attention(q, k, v, Dilated(3))

    def compute_causal(q, k, v):
        return attention(q, k, v, Causal())

    assert regard.examine(compute_dilated, expects=Dilated(3)).ok
    report = regard.examine(compute_causal, expects=Dilated(3))
    assert report.findings[0].kind == "wrong mask"
    assert "The measured mask is Causal()" in report.findings[0].evidence
