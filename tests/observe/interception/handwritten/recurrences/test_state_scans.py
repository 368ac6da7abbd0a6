"""The states of all tokens that a parallel scan computes are read as those of a loop are, whatever computes them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.interception.handwritten.state_loop_forms import SelectiveLayer
from observe.recording_checks import EQUAL, assert_equal, record_and_compare
from regard.observe.interception.handwritten.unread.unread_recurrences import ROUNDS, SCAN

pytestmark = pytest.mark.usefixtures("in_float64")
Scan = Callable[[Tensor, Tensor], Tensor]


def sweep(a: Tensor, x: Tensor) -> None:
    """mamba.py's up-sweep and down-sweep, in place, on (b, c, t, n), with t a power of 2."""
    b, c, t, _ = a.shape
    rounds, aa, xx = int(math.log2(t)), a, x
    for _ in range(rounds - 2):
        aa, xx = (y.view(b, c, y.shape[2] // 2, 2, -1) for y in (aa, xx))
        xx[:, :, :, 1].add_(aa[:, :, :, 1].mul(xx[:, :, :, 0]))
        aa[:, :, :, 1].mul_(aa[:, :, :, 0])
        aa, xx = aa[:, :, :, 1], xx[:, :, :, 1]
    xx[:, :, 1].add_(aa[:, :, 1].mul(xx[:, :, 0]))
    if xx.shape[2] == 4:
        xx[:, :, 3].add_(aa[:, :, 3].mul(xx[:, :, 2] + aa[:, :, 2].mul(xx[:, :, 1])))
    if rounds < 2:
        return
    step = 2 ** (rounds - 2)
    aa, xx = a[:, :, step - 1 : t : step], x[:, :, step - 1 : t : step]
    xx[:, :, 2].add_(aa[:, :, 2].mul(xx[:, :, 1]))
    aa[:, :, 2].mul_(aa[:, :, 1])
    for n in range(rounds - 3, -1, -1):
        aa, xx = (y[:, :, 2**n - 1 : t : 2**n] for y in (a, x))
        aa, xx = (y.view(b, c, y.shape[2] // 2, 2, -1) for y in (aa, xx))
        xx[:, :, 1:, 0].add_(aa[:, :, 1:, 0].mul(xx[:, :, :-1, 1]))
        aa[:, :, 1:, 0].mul_(aa[:, :, :-1, 1])


class Sweep(torch.autograd.Function):
    """mamba.py's parallel scan, on (b, t, c, n). https://github.com/alxndrTL/mamba.py"""

    @staticmethod
    def forward(ctx: Any, a_in: Tensor, x_in: Tensor) -> Tensor:
        t = x_in.shape[1]
        room = 2 ** math.ceil(math.log2(t)) - t
        a, x = (F.pad(y, (0, 0, 0, 0, 0, room)) if room else y.clone() for y in (a_in, x_in))
        a, x = a.transpose(2, 1), x.transpose(2, 1)
        sweep(a, x)
        return x.transpose(2, 1)[:, :t]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def double_steps(a: Tensor, h: Tensor) -> Tensor:
    """States of twice as many tokens in each round (Hillis and Steele 1986)."""
    step = 1
    while step < a.shape[1]:
        h = torch.cat([h[:, :step], h[:, step:] + a[:, step:] * h[:, :-step]], 1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
        step *= 2
    return h


def call_unknown_code(a: Tensor, h: Tensor) -> Tensor:
    """As a kernel of which no operation is seen."""
    with torch._C.DisableTorchFunction():
        return double_steps(a, h)


SCANS: dict[str, Scan] = {"sweeps": Sweep.apply, "doubled steps": double_steps, "unknown code": call_unknown_code}
READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda states, c: (states @ c.unsqueeze(-1)).squeeze(3),
    "einsum": lambda states, c: torch.einsum("bldn,bln->bld", states, c),
    "entries": lambda states, c: (states * c.unsqueeze(2)).sum(-1),
}


class SelectiveScan(SelectiveLayer):
    """A selective scan as mamba.py writes it, with its parallel scan."""

    def __init__(self, scan: Scan, read: str, c: int = 7, n: int = 3) -> None:
        super().__init__(c, n)
        self.scan, self.read = scan, READS[read]

    def forward(self, x: Tensor) -> Tensor:
        u, delta, a, b, c = self.project(x)
        decays = torch.exp(delta.unsqueeze(-1) * a)
        written = (delta.unsqueeze(-1) * b.unsqueeze(2)) * u.unsqueeze(-1)
        return self.read(self.scan(decays, written), c) + self.d * u


@pytest.mark.parametrize("t", [4, 11, 16])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("scan", SCANS)
def test_a_parallel_scan_has_the_matrix_of_its_definition_for_each_channel(scan, read, t):
    model, x = nn.Sequential(SelectiveScan(SCANS[scan], read)), torch.randn(2, t, 5)
    recording, output = record_and_compare(model, lambda model: model(x))
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        u, *_ = model[0].project(x)
        assert_equal(found.dense(), model[0].define(x))
    assert torch.equal(recording.values(0, kind="implicit").squeeze(-1), u.mT)
    assert_equal((found @ u.mT.unsqueeze(-1)).squeeze(-1).mT + model[0].d.detach() * u, output.detach())
    assert found.mechanism.rates.shape == (1, 7, 1, 3)
    assert found.certificate().error < EQUAL


def test_rows_of_a_parallel_scan_times_values_are_its_output_in_float32():
    model, x = SelectiveScan(Sweep.apply, "matmul").float(), torch.randn(2, 61, 5, dtype=torch.float32)
    recording, output = record_and_compare(model, lambda model: model(x))
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        u, *_ = model.project(x)
        expected = output - model.d * u
    assert ((found @ u.mT.unsqueeze(-1)).squeeze(-1).mT - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_scan_of_several_batch_rows_is_read_in_training_as_in_evaluation():
    model, x = SelectiveScan(Sweep.apply, "matmul"), torch.randn(3, 8, 5)
    with torch.no_grad():
        ours, _ = record_and_compare(model, lambda model: model(x))
    theirs, _ = record_and_compare(model, lambda model: model(x))
    assert torch.equal(*(one.map(0, kind="implicit").dense() for one in (ours, theirs)))


def scan_from_a_state(a: Tensor, h: Tensor) -> Tensor:
    return double_steps(a, torch.cat([h[:, :1] + 1, h[:, 1:]], 1))


def scan_backwards(a: Tensor, h: Tensor) -> Tensor:
    return double_steps(a.flip(1), h.flip(1)).flip(1)


@pytest.mark.parametrize("scan", [scan_from_a_state, scan_backwards])
def test_states_of_another_recurrence_are_missed(scan):
    recording, _ = record_and_compare(SelectiveScan(scan, "matmul"), lambda model: model(torch.randn(2, 9, 5)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [ROUNDS]


class ReversedSums(SelectiveScan):
    """mamba-tiny's scan: what is written, times the decays of all later tokens, is summed up and divided by these.

    https://github.com/PeaBrane/mamba-tiny
    """

    def __init__(self, eps: float) -> None:
        super().__init__(double_steps, "einsum")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        u, delta, a, b, c = self.project(x)
        logs = torch.einsum("bld,dn->bldn", delta, a)
        written = torch.einsum("bld,bld,bln->bldn", delta, u, b)
        later = F.pad(logs[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).exp().flip(1)
        states = (written * later).cumsum(1) / (later + self.eps)
        return torch.einsum("bldn,bln->bld", states, c) + u * self.d


def test_a_scan_by_sums_from_the_last_token_has_the_matrix_of_its_definition():
    model, x = nn.Sequential(ReversedSums(0)), torch.randn(2, 7, 5)
    recording, output = record_and_compare(model, lambda model: model(x))
    found = recording.map(0, kind="implicit")
    with torch.no_grad():
        u, *_ = model[0].project(x)
        expected = model[0].define(x)
    limit = 1e-9 * expected.abs().amax()  # the model divides by numbers as small as 1e-4
    assert (found.dense() - expected).abs().max() < limit
    assert ((found @ u.mT.unsqueeze(-1)).squeeze(-1).mT + model[0].d.detach() * u - output.detach()).abs().max() < limit


def test_a_scan_whose_divisors_are_kept_from_zero_is_missed():
    """Its matrix is not that of the recurrence where they are as small as what is added to them."""
    recording, _ = record_and_compare(ReversedSums(1e-3), lambda model: model(torch.randn(2, 11, 5)), missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [SCAN]
