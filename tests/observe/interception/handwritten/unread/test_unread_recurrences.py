"""Loops and scans over tokens of which no map is read are missed, with what they compute as the reason.

Those that are read are in test_channel_recurrence.py.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import compile_script
from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception import module_ends
from regard.observe.interception.handwritten.unread.unread_recurrences import CONSTANT_LOOP, CONSTANT_ROUNDS, LOOP, ROUNDS, SCAN

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 11, 5, 3


class Tokens(nn.Module):
    """A layer of projections, whose function mixes their tokens."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.inner, self.u = (
            style,
            nn.Linear(C, 4 * D),
            nn.Linear(D, 2 * D),
            nn.Parameter(torch.rand(D)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.style)(*self.project(x).chunk(4, -1))


class Loops(Tokens):
    """Loops over tokens whose decays and writes depend on these alone."""

    def sum_exponentials(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """RWKV-4, as written in its repository. https://arxiv.org/abs/2305.13048"""
        numerator, denominator, largest = (torch.zeros(B, D) for _ in range(3))
        largest, decay, outputs = largest - 1e38, -self.u.exp(), []
        for i in range(T):
            ki, vi = k[:, i], v[:, i]
            bound = torch.maximum(largest, ki + self.u)
            old, new = torch.exp(largest - bound), torch.exp(ki + self.u - bound)
            outputs.append(r[:, i].sigmoid() * (old * numerator + new * vi) / (old * denominator + new))
            bound = torch.maximum(largest + decay, ki)
            old, new = torch.exp(largest + decay - bound), torch.exp(ki - bound)
            numerator, denominator, largest = old * numerator + new * vi, old * denominator + new, bound
        return torch.stack(outputs, 1)

    def gate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """minGRU. https://arxiv.org/abs/2410.01201"""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            z = w[:, i].sigmoid()
            h = (1 - z) * h + z * k[:, i]
            outputs.append(h)
        return torch.stack(outputs, 1)

    def interpolate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With no output of the first token, which is the state that it begins with."""
        h, outputs = k[:, 0], []
        for i in range(1, T):
            h = torch.lerp(h, k[:, i], w[:, i].sigmoid())
            outputs.append(h)
        return torch.stack(outputs, 1)

    def correct(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With the first token as the state that it begins with, which is then corrected by itself."""
        h, outputs = k[:, 0], []
        for ki, z in zip(k.unbind(1), w.sigmoid().unbind(1), strict=True):
            h = h + z * (ki - h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def gate_in_place(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        h, outputs = torch.zeros(B, D), torch.empty(B, T, D)
        for i in range(T):
            h *= w[:, i].sigmoid()
            h += k[:, i]
            outputs[:, i] = h
        return outputs

    def mix_inside(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With layers that the loop calls for each token."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            z, new = self.inner(k[:, i]).chunk(2, -1)
            h = h * z.sigmoid() + new
            outputs.append(h)
        return torch.stack(outputs, 1)

    def gate_by_numbers(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With one gate for each token, (b, t, 1)."""
        h, outputs, gates = torch.zeros(B, D), [], w[..., :1].sigmoid()
        for i in range(T):
            h = gates[:, i] * h + (1 - gates[:, i]) * k[:, i]
            outputs.append(h)
        return torch.stack(outputs, 1)

    def decay_by_numbers(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With one decay for each token, (b, t)."""
        h, outputs, decays = torch.zeros(B, D), [], torch.exp(-F.softplus(w.mean(-1)))
        for decay, new in zip(decays.unbind(1), k.unbind(1), strict=True):
            h = decay.unsqueeze(-1) * h + new
            outputs.append(h)
        return torch.stack(outputs, 1)

    def smooth(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With constant decays."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = self.u * h + (1 - self.u) * k[:, i]
            outputs.append(h)
        return torch.stack(outputs, 1)

    def average_from_first(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With constant decays, and the first token as the state that it begins with."""
        h = k.select(1, 0)
        states = [h]
        for i in range(1, T):
            h = self.u * h + (1 - self.u) * k.select(1, i)
            states.append(h)
        return torch.stack(states, 1)

    def average_first_twice(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With the first token as the state before it, too."""
        h, states = k[:, 0], []
        for i in range(T):
            h = self.u * h + (1 - self.u) * k[:, i]
            states.append(h)
        return torch.stack(states, 1)

    def rotate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With constant decays that are complex numbers, as linear recurrent units. https://arxiv.org/abs/2303.06349"""
        h, outputs, new = torch.zeros(B, D).to(torch.complex128), [], torch.complex(k, v)
        for i in range(T):
            h = torch.polar(self.u, self.u) * h + new[:, i]
            outputs.append(h.real)
        return torch.stack(outputs, 1)


class Scans(Tokens):
    """All states at once."""

    def sum_masked(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With tokens that a mask leaves out."""
        sums = -F.softplus(w).cumsum(1)
        terms = (k * torch.exp(-sums)).masked_fill(torch.arange(T).view(-1, 1) > 8, 0)
        return terms.cumsum(1) * sums.exp()

    def sum_logarithms(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """minGRU's parallel form (Heinsen 2023, https://arxiv.org/abs/2311.06281)."""
        sums = (-F.softplus(w)).cumsum(1)
        return sums + ((-F.softplus(-w) + k) - sums).logcumsumexp(1)

    def divide_by_decays(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A selective scan by running sums, as of mamba-tiny."""
        logs = -F.softplus(w).cumsum(1)
        return r * (logs.exp() * (k * v * torch.exp(-logs)).cumsum(1))

    def divide_by_products(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        decays = w.sigmoid().cumprod(1)
        return r * ((k / decays).cumsum(1) * decays)


def join_pairs(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The operator of a scan: the decay of two series of tokens in a row, and the state after them."""
    decay, state = other
    return one[0] * decay, torch.addcmul(state, decay, one[1])


JOIN_IN_SCRIPT = compile_script(join_pairs)


def scan_in_pairs(join: Callable[..., tuple[Tensor, Tensor]], a: Tensor, h: Tensor) -> Tensor:
    """The states of a scan along dimension 1, as jax.lax.associative_scan joins them."""

    def interleave(one: Tensor, other: Tensor) -> Tensor:
        both = torch.stack([one, F.pad(other, (0, 0, 0, one.shape[1] - other.shape[1]))], 2)
        return both.flatten(1, 2)[:, : one.shape[1] + other.shape[1]]

    def scan(a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        n = a.shape[1]
        if n < 2:
            return a, h
        odd_a, odd_h = scan(*join((a[:, : n - 1 : 2], h[:, : n - 1 : 2]), (a[:, 1::2], h[:, 1::2])))
        m = (n - 1) // 2
        even_a, even_h = join((odd_a[:, :m], odd_h[:, :m]), (a[:, 2::2], h[:, 2::2]))
        even_a, even_h = torch.cat([a[:, :1], even_a], 1), torch.cat([h[:, :1], even_h], 1)
        return interleave(even_a, odd_a), interleave(even_h, odd_h)

    return scan(a, h)[1]


class Rounds(Tokens):
    """States that are joined in pairs, in as many rounds as the logarithm of the number of tokens."""

    def double_steps(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """States of twice as many tokens in each round (Hillis and Steele 1986)."""
        a, h, step = w.sigmoid(), k * v, 1
        while step < T:
            h = torch.cat([h[:, :step], h[:, step:] + a[:, step:] * h[:, :-step]], 1)
            a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], 1)
            step *= 2
        return r * h

    def double_in_place(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, h = torch.exp(-w * w), k.clone()
        for n in range(4):
            h[:, 2**n :] += a[:, 2**n :] * h[:, : -(2**n)]
            a[:, 2**n :] = a[:, 2**n :] * a[:, : -(2**n)]
        return h

    def shift(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With states before the first token that are 0."""
        a, h = w.sigmoid(), k
        for n in range(4):
            before, decays = F.pad(h, (0, 0, 2**n, 0))[:, :T], F.pad(a, (0, 0, 2**n, 0), value=1.0)[:, :T]
            h, a = torch.addcmul(h, a, before), a * decays
        return h

    def shift_parts(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With states before the first token that are 0, of the tokens that stay."""
        a, h = w.sigmoid(), k * v
        for n in range(4):
            before, decays = F.pad(h[:, : -(2**n)], (0, 0, 2**n, 0)), F.pad(a, (0, 0, 2**n, -(2**n)), value=1.0)
            h, a = h + a * before, a * decays
        return h

    def shift_states_first(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With states that are joined before decays are moved."""
        a, h = w.sigmoid(), k * v
        for n in range(4):
            h = torch.addcmul(h, a, F.pad(h[:, : -(2**n)], (0, 0, 2**n, 0)))
            a = a * F.pad(a[:, : -(2**n)], (0, 0, 2**n, 0), value=1.0)
        return h

    def join_zeros(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With states that are joined first, behind as many zeros as tokens are left out."""
        a, h = w.sigmoid(), k * v
        for n in range(4):
            h = h + a * torch.cat([torch.zeros_like(h[:, : 2**n]), h[:, : -(2**n)]], 1)
            a = a * torch.cat([torch.ones_like(a[:, : 2**n]), a[:, : -(2**n)]], 1)
        return h

    def roll(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, h, places = w.sigmoid(), k * v, torch.arange(T).unsqueeze(1)
        for n in range(4):
            h = h + a * torch.where(places >= 2**n, h.roll(2**n, 1), 0.0)
            a = a * torch.where(places >= 2**n, a.roll(2**n, 1), 1.0)
        return h

    def join_odd_and_even(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As jax.lax.associative_scan."""
        return r * scan_in_pairs(lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1]), w.sigmoid(), k * v)

    def join_by_script(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As S5 and GateLoop in PyTorch, whose operator torch.jit compiles."""
        return r * scan_in_pairs(JOIN_IN_SCRIPT, w.sigmoid(), k * v)

    def rotate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With constant decays that are complex numbers, as S5. https://arxiv.org/abs/2208.04933"""
        decays = torch.polar(self.u, self.u).expand(B, T, D)
        return scan_in_pairs(
            lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1]), decays, torch.complex(k, v)
        ).real

    def decay(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With constant decays."""
        a = self.u.expand(B, T, D)
        return r * scan_in_pairs(lambda one, other: (one[0] * other[0], other[0] * one[1] + other[1]), a, k * v)

    def sweep_up_and_down(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In place, as mamba.py's parallel scan."""
        a, h = F.pad(w.sigmoid(), (0, 0, 0, 5)), F.pad(k * v, (0, 0, 0, 5))
        for n in (1, 2, 4, 8):
            h[:, 2 * n - 1 :: 2 * n].add_(a[:, 2 * n - 1 :: 2 * n].mul(h[:, n - 1 :: 2 * n]))
            a[:, 2 * n - 1 :: 2 * n].mul_(a[:, n - 1 :: 2 * n])
        for n in (4, 2, 1):
            h[:, 3 * n - 1 :: 2 * n].add_(a[:, 3 * n - 1 :: 2 * n].mul(h[:, 2 * n - 1 : -1 : 2 * n]))
            a[:, 3 * n - 1 :: 2 * n].mul_(a[:, 2 * n - 1 : -1 : 2 * n])
        return h[:, :T]


ROUNDS_OF = [
    *("double_steps", "double_in_place", "shift", "join_odd_and_even", "join_by_script", "sweep_up_and_down"),
    *("shift_states_first", "join_zeros", "roll"),
]
MISSED: dict[str, tuple[type[Tokens], str]] = {
    **dict.fromkeys(("interpolate", "correct"), (Loops, LOOP)),
    "average_first_twice": (Loops, CONSTANT_LOOP),
    "sum_masked": (Scans, SCAN),
    "join_by_script": (Rounds, ROUNDS),
    "roll": (Rounds, ROUNDS),
}


def run_by_definition(a: Tensor, x: Tensor) -> Tensor:
    """The states h_i = a_i h_(i - 1) + x_i, in a loop."""
    states = [x[:, 0]]
    for i in range(1, T):
        states.append(a[:, i] * states[-1] + x[:, i])
    return torch.stack(states, 1)


@pytest.mark.parametrize("style", ROUNDS_OF)
def test_the_rounds_of_these_tests_are_recurrences_over_tokens(style):
    r, w, k, v = torch.randn(4, B, T, D)
    decays = torch.exp(-w * w) if style == "double_in_place" else w.sigmoid()
    states = run_by_definition(decays, k if style in ("double_in_place", "shift") else k * v)
    expected = r * states if style in ("double_steps", "join_odd_and_even", "join_by_script") else states
    torch.testing.assert_close(getattr(Rounds(style), style)(r, w, k, v), expected)


@pytest.mark.parametrize(("kind", "reason"), [(Loops, CONSTANT_LOOP), (Rounds, CONSTANT_ROUNDS)])
def test_a_recurrence_with_constant_complex_decays_is_missed_by_its_reason(kind, reason):
    recording, _ = record_and_compare(nn.Sequential(kind("rotate")), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", reason)]


class Mixed(nn.Module):
    """A loop over tokens that are heads (b, t, h, d) or (b, h, t, d) already, from zeros or from the first token."""

    def __init__(self, axis: int, starts_at_zero: bool) -> None:
        super().__init__()
        self.axis, self.starts_at_zero = axis, starts_at_zero

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        first = x.select(self.axis, 0)
        state, outputs = torch.zeros_like(first) if self.starts_at_zero else first, []
        for decay, new in zip(a.unbind(self.axis), x.unbind(self.axis), strict=True):
            state = decay * state + new
            outputs.append(state)
        return torch.stack(outputs, self.axis)


class Split(nn.Module):
    def __init__(self, axis: int, starts_at_zero: bool) -> None:
        super().__init__()
        self.inner, self.mix = nn.Linear(C, 12), Mixed(axis, starts_at_zero)

    def forward(self, x: Tensor) -> Tensor:
        a, x = self.inner(x).unflatten(-1, (2, 2, 3)).unbind(2)
        return self.mix(*(y.transpose(1, 2) if self.mix.axis == 2 else y for y in (a.sigmoid(), x)))


@pytest.mark.parametrize("axis", [1, 2])
def test_a_loop_in_a_module_that_is_given_heads_alone_is_missed_or_read(axis):
    x = torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(Split(axis, False)), lambda model: model(x), missing=True)
    assert [(one.module, one.reason) for one in recording.missed] == [("0.mix", LOOP)]
    recording, output = record_and_compare(nn.Sequential(Split(axis, True)), lambda model: model(x))
    assert [call.name for call in recording.calls] == ["0.mix"]
    product = (recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")).squeeze(-1)  # (b, h d, t)
    assert_equal(product, output.detach().movedim(axis, -1).flatten(1, 2))


@pytest.mark.parametrize("style", MISSED)
def test_a_recurrence_that_is_not_read_is_missed_by_its_reason(style):
    kind, reason = MISSED[style]
    recording, _ = record_and_compare(nn.Sequential(kind(style)), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, one.reason) for one in recording.missed] == [("0", reason)]


class Others(Tokens):
    """Loops and running sums in which no tokens are added up with decays that tokens or weights decide."""

    def read_states(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A gated recurrent network, whose gates read its state."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            z, new = (self.inner(h) + torch.cat([w[:, i], k[:, i]], -1)).chunk(2, -1)
            h = (1 - z.sigmoid()) * h + z.sigmoid() * new.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)

    def remember(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A long short-term memory."""
        h, c, outputs = torch.zeros(B, D), torch.zeros(B, D), []
        for i in range(T):
            f, new = (self.inner(h) + torch.cat([w[:, i], k[:, i]], -1)).chunk(2, -1)
            c = f.sigmoid() * c + (-f).sigmoid() * new.tanh()
            h = c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)

    def fire(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Spiking neurons, which forget when they fire."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            h = self.u * h * (h < 1).to(h.dtype) + k[:, i]
            outputs.append(h)
        return torch.stack(outputs, 1)

    def evaluate_polynomial(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = torch.zeros_like(k)
        for one in torch.linspace(0, 1, 6):
            y = y * k + one
        return y

    def denoise(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sampler, each step of which reads what the one before made."""
        y = k
        for i in range(6):
            y = (1 - 0.1 * i) * y + w[:, i : i + 1].sigmoid() * self.inner(y)[..., :D]
        return y

    def couple(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Affine couplings of a flow."""
        y, other = k, v
        for i in range(10):
            scale, shift = (self.inner(other) + torch.cat([w[:, i : i + 1], r[:, i : i + 1]], -1)).chunk(2, -1)
            y, other = other, y * scale.exp() + shift
        return y

    def add_residuals(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for i in range(6):
            k = k + w[:, i : i + 1].sigmoid() * self.inner(k)[..., :D]
        return k

    def add_experts(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, gates = torch.zeros_like(k), torch.cat([w, v], -1).softmax(-1)
        for i in range(2 * D):
            y = y + gates[..., i : i + 1] * self.inner(k)[..., :D]
        return y

    def modulate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Features that conditions scale and shift in several layers."""
        for i in range(6):
            k = F.relu(k * w[:, i : i + 1] + v[:, i : i + 1])
        return k

    def render(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Colors along a ray, and places that are drawn from their weights."""
        density = F.softplus(w[..., 0])
        weights = (1 - torch.exp(-density)) * torch.exp(-density.cumsum(-1))
        drawn = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)
        return torch.einsum("bt,btd->bd", weights, k) + drawn.mean()

    def count_positions(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = (w[..., :1] > 0).cumsum(1) * torch.exp(-torch.arange(D))
        return k * places.cos() + v * places.sin()

    def cut_nucleus(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sampler of the likeliest words."""
        probabilities, order = w.softmax(-1).sort(-1, descending=True)
        kept = probabilities.masked_fill(probabilities.cumsum(-1) > 0.9, 0)
        return (kept / kept.sum(-1, keepdim=True)).gather(-1, order.argsort(-1))

    def multiply_complex(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Products of complex numbers, whose parts are the halves of a tensor."""
        a, y = torch.stack([r, w], -1), torch.stack([k, v], -1)
        for _ in range(5):
            real, imaginary = y[..., 0] * a[..., 0] - y[..., 1] * a[..., 1], y[..., 0] * a[..., 1] + y[..., 1] * a[..., 0]
            a, y = torch.stack([a[..., 0] * a[..., 1], a[..., 1]], -1), torch.stack([real, imaginary], -1)
        return y

    def transform(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A butterfly of constants in each round, as of a Fourier transform."""
        y = k[:, :8]
        for n in (1, 2, 4):
            a, b = y.view(B, -1, 2, n, D).unbind(2)
            y = torch.stack([a + b, (a - b) * torch.linspace(1, 2, n).unsqueeze(-1)], 2).view(B, 8, D)
        return y

    def composite(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Layers of a picture, one over the other."""
        canvas = torch.ones(B, D)
        for i in range(T):
            canvas = canvas * (1 - w[:, i].sigmoid()) + w[:, i].sigmoid() * k[:, i]
        return canvas

    def estimate_advantages(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Numbers of a loss: one for each token."""
        rewards, ends, y, outputs = r[..., 0], w[..., 0].sigmoid(), torch.zeros(B), []
        for i in reversed(range(T)):
            y = rewards[:, i] + 0.9 * (1 - ends[:, i]) * y
            outputs.append(y)
        return torch.stack(outputs, 1).exp()

    def modulate_by_conditions(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As many layers as tokens."""
        for i in range(T):
            k = k * w[:, i, None] + v[:, i, None]
        return k

    def loop_over_features(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, outputs, w, k = torch.zeros(B, T), [], w.repeat(1, 1, 4)[..., :T], k.repeat(1, 1, 4)[..., :T]
        for i in range(T):
            y = y * w[..., i] + k[..., i]
            outputs.append(y)
        return torch.stack(outputs, -1).exp()

    def rank(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A loss of ranks, as of Cox or of Plackett and Luce."""
        return ((w.logcumsumexp(1) - w) * k.sigmoid()).sum(1)

    def measure_energy(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Envelopes that decay, and how much of them has passed."""
        envelopes = torch.exp(-F.softplus(w).cumsum(1))
        return (envelopes * envelopes).cumsum(1) * envelopes + (envelopes * k).cumsum(1) * envelopes

    def break_sticks(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = w.sigmoid() * (1 - w.sigmoid()).cumprod(1)
        return (parts.cumsum(1) * parts).sum(1) * k.exp().sum(1)

    def estimate_returns(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sums of several rewards until an episode ends."""
        ends, y, outputs = (w[..., 0] > 0).to(w.dtype), torch.zeros(B, D), []
        for i in reversed(range(T)):
            y = k[:, i] + 0.9 * (1 - ends[:, i, None]) * y
            outputs.append(y)
        return torch.stack(outputs, 1)

    def composite_by_opacity(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Colors along a ray, from the back to the front."""
        canvas, opacity = torch.zeros(B, D), 1 - torch.exp(-F.softplus(w[..., :1]))
        for i in range(T):
            canvas = canvas * (1 - opacity[:, i]) + opacity[:, i] * k[:, i]
        return canvas

    def composite_in_a_tree(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same in pairs of neighbors."""
        clear, color = F.pad(w.sigmoid(), (0, 0, 0, 5), value=1.0), F.pad(k, (0, 0, 0, 5))
        while color.shape[1] > 1:
            color = color[:, ::2] + clear[:, ::2] * color[:, 1::2]
            clear = clear[:, ::2] * clear[:, 1::2]
        return color[:, 0]

    def multiply_up(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Running products alone, in rounds."""
        a = w.sigmoid()
        for n in (1, 2, 4, 8):
            a = torch.cat([a[:, :n], a[:, n:] * a[:, :-n]], 1)
        return a * k

    def pair_powers(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A polynomial by Estrin's scheme."""
        x, y = w[..., :1], F.pad(k, (0, 0, 0, 5))
        while y.shape[1] > 1:
            y, x = y[:, ::2] + x[:, :1] * y[:, 1::2], x * x
        return y[:, 0]

    def lift(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A wavelet whose filters depend on tokens."""
        y, outputs = k[:, :8], []
        while y.shape[1] > 1:
            even, odd = y[:, ::2], y[:, 1::2]
            odd = odd - w[:, : odd.shape[1]].tanh() * even
            y, outputs = even + v[:, : odd.shape[1]].tanh() * odd, [*outputs, odd]
        return torch.cat([y, *outputs], 1)

    def sort_softly(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A network of soft comparisons."""
        y = k[:, :8]
        for n in (1, 2, 4):
            one, other = y.view(B, -1, 2, n, D).unbind(2)
            p = (one - other).sigmoid()
            y = torch.stack([p * one + (1 - p) * other, p * other + (1 - p) * one], 2).view(B, 8, D)
        return y

    def smooth_in_rounds(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Dilated residual filters, each with gates of its own."""
        gates, y = w.sigmoid(), k
        for n in (1, 2, 4, 8):
            y = torch.cat([y[:, :n], y[:, n:] + gates[:, n:] * y[:, :-n]], 1)
        return y

    def rotate(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotations by angles of tokens, several times."""
        one, other = w.tanh().chunk(2, 1)[0], v.tanh().chunk(2, 1)[0]
        y, z = k.chunk(2, 1)[0], r.chunk(2, 1)[0]
        for _ in range(4):
            y, z = y * one - z * other, y * other + z * one
            one, other = one * one - other * other, 2 * one * other
        return torch.cat([y, z], 1)

    def sample_words(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A decoder that adds the likeliest word to its state."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            scores = h * v[:, i].sigmoid() + r[:, i]
            h = w[:, i].sigmoid() * h + self.inner.weight[:D][scores.argmax(-1)]
            outputs.append(scores)
        return torch.stack(outputs, 1)

    def search_beams(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The three best of all words after three others."""
        best, logs, beams = torch.zeros(B, 3), w.log_softmax(-1), []
        for i in range(T):
            every = best.unsqueeze(-1) * (i + 1) ** 0.6 + logs[:, i, None]
            best, words = every.flatten(1).topk(3)
            best = best / (i + 2) ** 0.6
            beams.append(words % D)
        return best + torch.stack(beams, 1).float().mean(1).to(best.dtype)

    def average_weights(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Weights that fall behind those of each step."""
        average, averages = torch.zeros(D), []
        for one in self.inner.weight[:, :D].unbind(0):
            average = 0.9 * average + 0.1 * one
            averages.append(average)
        return k * torch.stack(averages).exp().mean(0)

    def step_with_momentum(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Gradient descent on a quadratic."""
        y, velocity = k, torch.zeros_like(k)
        for i in range(T):
            velocity = 0.9 * velocity - 0.1 * (y - v)
            y = y + velocity * w[:, i, None].sigmoid()
        return y

    def read_states_by_layers(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Layers of each token beside one that reads the state."""
        h, outputs = torch.zeros(B, D), []
        for i in range(T):
            z, new = (self.inner(k[:, i]) + self.inner(h)).chunk(2, -1)
            h = (1 - z.sigmoid()) * h + z.sigmoid() * new.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)

    def mix_first_tokens(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A first token that gates of two others change."""
        first = k[:, 0]
        y = first * w[:, 1].sigmoid() + k[:, 1]
        return torch.stack([first, y, torch.where(w[:, 2] > 0, y, first)], 1)

    def interpolate_to_one(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A pooling that begins with the first token."""
        y = k[:, 0]
        for i in range(1, T):
            y = torch.lerp(y, k[:, i], w[:, i].sigmoid())
        return y

    def shift_tokens(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Gates of each token and the one before. https://arxiv.org/abs/2305.13048"""
        before, gates = F.pad(k, (0, 0, 1, -1)), w.sigmoid()
        return (k * gates + before * (1 - gates)).tanh() * before

    def remember_masked(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A gated recurrent unit whose state padding keeps."""
        h, outputs, seen = torch.zeros(B, D), [], torch.arange(T) < torch.tensor([[T], [4]])
        for i in range(T):
            z, new = (self.inner(h) + torch.cat([w[:, i], k[:, i]], -1)).chunk(2, -1)
            h = torch.where(seen[:, i, None], torch.lerp(h, new.tanh(), z.sigmoid()), h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    def remember_from_first(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Gates that read the state, over tokens that are first."""
        h, outputs = k[:, 0], []
        for one, other in zip(w.transpose(0, 1), k.transpose(0, 1), strict=True):
            z, new = (self.inner(h) + torch.cat([one, other], -1)).chunk(2, -1)
            h = z.sigmoid() * h + new.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


class Silent(Tokens):
    """Recurrences over tokens that are neither recorded nor missed: their parts may be of something else."""

    def read_once(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A state that the query of the last token reads, as a classifier of sequences may."""
        state = torch.zeros(B, D, D)
        for i in range(T):
            state = w[:, i, :, None].sigmoid() * state + k[:, i, :, None] * v[:, i, None]
        return (r[:, -1:] @ state).squeeze(1)

    def combine(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Pairs of neighbors, joined in place, as the first half of mamba.py's parallel scan has them."""
        a, h = F.pad(w.sigmoid(), (0, 0, 0, 5)), F.pad(k * v, (0, 0, 0, 5))
        for _ in range(4):
            n = h.shape[1] // 2
            h, a = h.view(B, n, 2, D), a.view(B, n, 2, D)
            h[:, :, 1].add_(a[:, :, 1].mul(h[:, :, 0]))
            a[:, :, 1].mul_(a[:, :, 0])
            h, a = h[:, :, 1], a[:, :, 1]
        return r[:, -1:] * h


SILENT = ["read_once", "combine"]
OTHERS = [
    *("read_states", "remember", "fire", "evaluate_polynomial", "denoise", "couple", "add_residuals", "add_experts"),
    *("modulate", "render", "count_positions", "cut_nucleus", "multiply_complex", "transform", "composite"),
    *("estimate_advantages", "modulate_by_conditions", "loop_over_features", "rank", "measure_energy", "break_sticks"),
    *("estimate_returns", "composite_by_opacity", "composite_in_a_tree", "multiply_up", "pair_powers", "lift", "sort_softly"),
    *("smooth_in_rounds", "rotate", "sample_words", "search_beams", "average_weights", "step_with_momentum"),
    *("read_states_by_layers", "mix_first_tokens", "interpolate_to_one", "shift_tokens", "remember_masked"),
    "remember_from_first",
]


@pytest.mark.parametrize(("kind", "style"), [*((Others, one) for one in OTHERS), *((Silent, one) for one in SILENT)])
def test_other_loops_and_running_sums_are_neither_recorded_nor_missed(kind, style):
    recording, _ = record_and_compare(nn.Sequential(kind(style)), lambda model: model(torch.randn(B, T, C)))
    assert not recording.calls


class LongMemory(nn.Module):
    """A long short-term memory with more operations than a search visits, by a loop that also computes exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(C, 4 * C), nn.Linear(C, 4 * C)

    def forward(self, x: Tensor) -> Tensor:
        h, c, given, outputs = torch.zeros(1, C), torch.zeros(1, C), self.inputs(x), []
        for i in range(x.shape[1]):
            f, j, g, o = (self.states(h) + given[:, i]).chunk(4, -1)
            c = f.sigmoid() * c + torch.exp(-F.softplus(j)) * g.tanh()
            h = c.tanh() * o.sigmoid()
            outputs.append(h)
        return torch.stack(outputs, 1)


def test_a_long_network_whose_gates_read_its_state_is_neither_recorded_nor_missed():
    recording, _ = record_and_compare(nn.Sequential(LongMemory()), lambda model: model(torch.randn(1, 1000, C)))
    assert not recording.calls


class TokensFirst(nn.Module):
    """A loop over tokens that are along the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 2 * C)

    def forward(self, x: Tensor) -> Tensor:
        (w, k), h, outputs = self.project(x).chunk(2, -1), torch.zeros(B, C), []
        for decay, new in zip(torch.exp(-w * w).unbind(0), k, strict=True):
            h = decay * h + new
            outputs.append(h)
        return torch.stack(outputs)


def test_a_loop_with_tokens_first_is_read():
    model, x = nn.Sequential(TokensFirst()), torch.randn(T, B, C)
    recording, output = record_and_compare(model, lambda model: model(x))
    product = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    assert_equal(product.squeeze(-1).permute(2, 0, 1), output.detach())


def test_no_recurrence_is_searched_for_an_intervention(monkeypatch):
    searched: list[object] = []
    monkeypatch.setattr(module_ends, "find_unread_recurrence", lambda frame, _: searched.append(frame) or "")
    model, x = nn.Sequential(Loops("gate"), nn.TransformerEncoderLayer(D, 1, 4, batch_first=True)), torch.randn(B, T, C)
    with regard.intervene(model, regard.KnockOut(layer=0, head=0)):
        model(x)
    assert not searched
    with regard.record(model):
        model(x)
    assert len(searched) == 1


def test_a_search_that_fails_is_reported(monkeypatch):
    def fail(*_):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(module_ends, "find_unread_recurrence", fail)
    recording, _ = record_and_compare(nn.Sequential(Loops("gate")), lambda model: model(torch.randn(B, T, C)), missing=True)
    assert "no such operation" in recording.missed[0].reason
