"""Softmaxes, products and sums that are no attention are neither recorded nor missed: experts, codes, losses, mixes, norms."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from observe.recording_checks import record_and_compare

B, T, C, E, K, W = 2, 5, 12, 3, 7, 4  # batch, tokens, features, experts, codes or places, width of a window


class Parts(nn.Module):
    """Layers and parameters, and a function of them and of tokens x (b, t, c)."""

    def __init__(self, mix: Callable[["Parts", Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.score, self.route, self.line = mix, nn.Linear(C, K), nn.Linear(C, E), nn.Linear(C, C)
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(E))
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * C, C)), nn.Parameter(torch.randn(E, C, 2 * C))
        self.codes, self.kernel = nn.Parameter(torch.randn(K, C)), nn.Parameter(torch.randn(E))
        self.of_tokens, self.matrices = nn.Linear(C, 3 * T), nn.Parameter(torch.randn(E, C, C))
        self.normed = weight_norm(nn.Linear(C, C))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


# Experts, whose gates are a softmax.


def loop_over_experts(m: Parts, x: Tensor) -> Tensor:
    gates, out = m.route(x).softmax(-1), torch.zeros_like(x)
    for n in range(E):
        out = out + gates[..., n, None] * F.linear(F.silu(F.linear(x, m.up[n])), m.down[n])
    return out


def dispatch_tokens(m: Parts, x: Tensor) -> Tensor:
    """As GShard and Switch write it: which token goes to which place of which expert is a mask."""
    x = x.flatten(0, 1)
    gates = m.route(x).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), E)
    place = F.one_hot((chosen.cumsum(0) * chosen).max(-1).values - 1, len(x))
    combine = (gates * chosen)[..., None] * place[:, None].to(gates.dtype)
    given = torch.einsum("tep,tc->epc", combine.bool().to(x.dtype), x)
    return torch.einsum("tep,epc->tc", combine, torch.bmm(torch.bmm(given, m.up.mT).relu(), m.down.mT))


def run_experts(m: Parts, x: Tensor) -> Tensor:
    return torch.stack([expert(x) for expert in m.experts], -2)


def gate_experts(m: Parts, x: Tensor) -> Tensor:
    """Those of the largest two gates."""
    gates = m.route(x).softmax(-1)
    values, chosen = gates.topk(2)
    gates = torch.zeros_like(gates).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
    return torch.einsum("bte,btec->btc", gates, run_experts(m, x))


EXPERTS = {
    "loops": loop_over_experts,
    "dispatched tokens": dispatch_tokens,
    "the largest two": gate_experts,
    "all, by einsum": lambda m, x: torch.einsum("bte,btec->btc", m.route(x).softmax(-1), run_experts(m, x)),
    "all, by sums": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-1) * run_experts(m, x)).sum(-2),
    "by exponentials": lambda m, x: torch.einsum(
        "bte,btec->btc", (e := m.route(x).exp()) / e.sum(-1, keepdim=True), run_experts(m, x)
    ),
    "dynamic kernels": lambda m, x: x @ torch.einsum("bk,kio->bio", m.route(x.mean(1)).softmax(-1), m.matrices),
}

# Codes, classes and losses.


def contrast(m: Parts, x: Tensor) -> Tensor:
    one, other = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, 1], dim=-1)
    return F.cross_entropy(one @ other.mT / 0.1, torch.arange(B))


def sample_token(m: Parts, x: Tensor) -> Tensor:
    probabilities = (x[:, -1:] @ m.codes.mT).softmax(-1)
    return probabilities @ m.codes + m.codes[torch.multinomial(probabilities[:, 0], 1)]


def quantize(m: Parts, x: Tensor) -> Tensor:
    nearest = m.codes[torch.cdist(x.flatten(0, 1), m.codes).argmin(-1)].view(x.shape)
    return x + (nearest - x).detach()


CODES = {
    "soft codes": lambda m, x: (-torch.cdist(x.flatten(0, 1), m.codes)).softmax(-1) @ m.codes,
    "the nearest codes": quantize,
    "hard codes": lambda m, x: torch.einsum("btk,kc->btc", F.gumbel_softmax(m.score(x), hard=True), m.codes),
    "picked codes": lambda m, x: (m.score(x).softmax(-1)[..., None] * m.codes[(x @ m.codes.mT).topk(K).indices]).sum(2),
    "a sampled token": sample_token,
    "classes": lambda m, x: m.score(x).softmax(-1),
    "the mean of bins": lambda m, x: m.score(x).softmax(-1) @ torch.arange(float(K)),
    "a contrast": contrast,
    "entropy": lambda m, x: -((w := m.score(x).softmax(-1)) * w.log()).sum(-1),
    "places of a heat map": lambda m, x: (m.score(x).mT.softmax(-1) * torch.arange(T)).sum(-1),
}

# Softmaxes over features, layers, shifts and windows that no token predicts.


def shift(x: Tensor) -> list[Tensor]:
    return [x.roll(n, 1) for n in range(E)]


def run_layers(m: Parts, x: Tensor) -> list[Tensor]:
    states = [x]
    for expert in m.experts[1:]:
        states.append(expert(states[-1]).tanh())
    return states


def unfold(x: Tensor, dim: int = 1) -> Tensor:
    return F.pad(x, (0, 0, E - 1, 0) if dim == 1 else (E - 1, 0)).unfold(dim, E, 1)


MIXES = {
    "channels": lambda m, x: x * m.line(x).softmax(-1) + x,
    "gated channels": lambda m, x: x * (m.line(x).tanh() * x.sigmoid()).softmax(1),
    "a weight for each channel of tokens beside their mean": lambda m, x: torch.einsum(
        "btc,btc->bc", m.line((x - x.mean(1, keepdim=True)).tanh() + m.line(x)).softmax(1), x
    ),
    "a light convolution": lambda m, x: unfold(x) @ m.kernel.softmax(0),
    "a correlation volume": lambda m, x: torch.stack([(x * one).mean(-1) for one in shift(m.line(x))], 1).softmax(1).mean(1),
    "pooling": lambda m, x: torch.stack(shift(x), 2).amax(2) * m.line(x).softmax(-1) + F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "layers, by tensordot": lambda m, x: torch.tensordot(m.kernel.softmax(0), torch.stack(run_layers(m, x)), 1),
    "routed layers": lambda m, x: torch.einsum("btl,btlc->btc", m.route(x).softmax(-1), torch.stack(run_layers(m, x), 2)),
}

# Products and positive numbers that weigh no tokens.


def turn(m: Parts, x: Tensor) -> Tensor:
    return torch.linalg.qr(x[:, :3, :3]).Q @ torch.linalg.qr(m.line(x)[:, :3, :3]).Q @ x[:, :3]


def normalize_features(m: Parts, x: Tensor) -> Tensor:
    y = (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(1e-5).sqrt()
    return y * (y * m.line(x)).pow(2).mean(-1, keepdim=True).add(1e-5).pow(-0.5)


def multiply_chain(m: Parts, x: Tensor) -> Tensor:
    one, two, three = (part.softmax(-1) for part in m.of_tokens(x).chunk(3, -1))
    return one @ (two @ three)


def mix_streams(m: Parts, x: Tensor) -> Tensor:
    """Hyper-connections: residual streams that layers mix by weights of each token. https://arxiv.org/abs/2409.19606"""
    streams = x.unsqueeze(2).repeat(1, 1, E, 1)
    for _ in range(2):
        mixing = m.route(F.layer_norm(streams, (C,))).softmax(-1)
        streams = mixing @ streams + m.line(streams.mean(2)).unsqueeze(2)
    return streams.sum(2)


def rotate_pairs(m: Parts, x: Tensor) -> Tensor:
    """Positions that are handed over with their frequencies."""
    angles = (torch.arange(T).float()[:, None] * torch.arange(C // 2).neg().exp()).repeat_interleave(2, -1)
    return x * angles.cos() + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * angles.sin()


ALGEBRA = {
    "bilinear pooling": lambda m, x: F.normalize((p := (x.mT @ m.line(x)).flatten(1)).sign() * p.abs().sqrt(), dim=-1),
    "a covariance": lambda m, x: x @ m.line.weight @ (x.mT @ x),
    "whitening": lambda m, x: x @ torch.linalg.eigh(x.mT @ x / T).eigenvectors,
    "rotations": turn,
    "a norm": normalize_features,
    "a gate": lambda m, x: x + torch.sigmoid((x * m.line(x)).sum(-1, keepdim=True)) * x,
    "a gate of places and channels": lambda m, x: (
        x * (1 + torch.sigmoid(m.line(x).mean(1, keepdim=True) + x.mean(-1, keepdim=True)))
    ).sum(1),
    "modulated weights": lambda m, x: F.leaky_relu(x @ (m.up[0] * x.mean(1)[:, None]).mT) @ m.down[0].mT,
    "a mixer whose layers tokens make": lambda m, x: m.line(x) @ F.gelu(m.line(x).mT @ x),
    "a layer of normed weights": lambda m, x: F.linear(F.silu(m.normed(x)), m.normed.weight),
    "a bilinear layer": lambda m, x: torch.einsum("bth,btd->btd", torch.einsum("btd,hde,bte->bth", x, m.matrices, x), x),
    "a chain of matrices": multiply_chain,
    "points that joints move": lambda m, x: torch.einsum(
        "btij,btj->bti", torch.einsum("bte,beij->btij", m.route(x).relu(), x[:, :E].exp().unflatten(-1, (E, W))), x[..., :W]
    ),
    "streams": mix_streams,
    "radial features": lambda m, x: torch.exp(-((x.norm(dim=-1, keepdim=True) - m.kernel) ** 2)) @ m.codes[:E] * x,
    "a histogram": lambda m, x: torch.exp(-((x.unsqueeze(-1) - m.kernel) ** 2)).sum(1),
    "differences of tokens": lambda m, x: m.line(F.normalize(x.unsqueeze(2) - x.unsqueeze(1), dim=-1)).sum(2),
    "rotary positions": rotate_pairs,
}


FORMS = EXPERTS | CODES | MIXES | ALGEBRA


@pytest.mark.parametrize("name", FORMS)
def test_softmaxes_and_products_that_are_no_attention_are_neither_recorded_nor_missed(name):
    torch.manual_seed(3)
    part, x = Parts(FORMS[name]), torch.randn(B, T, C)
    model = nn.Sequential(nn.Linear(C, C), part)
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            recording, _ = record_and_compare(model, lambda m: m(x))
        assert not recording.calls
