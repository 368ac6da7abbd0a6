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
        self.wide, self.experts = nn.Linear(C, K * C), nn.ModuleList(nn.Linear(C, C) for _ in range(E))
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * C, C)), nn.Parameter(torch.randn(E, C, 2 * C))
        self.codes, self.kernel, self.rows = (
            nn.Parameter(torch.randn(K, C)),
            nn.Parameter(torch.randn(E)),
            nn.Parameter(torch.randn(2, E)),
        )
        self.of_tokens, self.to_five, self.matrices = nn.Linear(C, 3 * T), nn.Linear(C, 5), nn.Parameter(torch.randn(E, C, C))
        self.normed, self.one, self.other = weight_norm(nn.Linear(C, C)), nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


# Experts, whose gates are a softmax.


def loop_over_experts(m: Parts, x: Tensor) -> Tensor:
    gates, out = m.route(x).softmax(-1), torch.zeros_like(x)
    for n in range(E):
        out = out + gates[..., n, None] * F.linear(F.silu(F.linear(x, m.up[n])), m.down[n])
    return out


def index_tokens(m: Parts, x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    values, chosen = m.route(x).softmax(-1).topk(2)
    values, out = values / values.sum(-1, keepdim=True), torch.zeros_like(x)
    for n in chosen.unique():
        where, place = torch.where(chosen == n)
        made = F.linear(F.relu(F.linear(x[where], m.up[n])), m.down[n])
        out.index_add_(0, where, made * values[where, place, None])
    return out


def batch_tokens(m: Parts, x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    values, chosen = m.route(x).softmax(-1).topk(2)
    up, down = m.up[chosen.flatten()], m.down[chosen.flatten()]
    made = torch.bmm(down, torch.bmm(up, x.repeat_interleave(2, 0).unsqueeze(-1)).relu()).squeeze(-1)
    return (made * values.flatten().unsqueeze(-1)).view(len(x), 2, C).sum(1)


def dispatch_tokens(m: Parts, x: Tensor) -> Tensor:
    """As GShard and Switch write it: which token goes to which place of which expert is a mask."""
    x = x.flatten(0, 1)
    gates = m.route(x).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), E)
    place = F.one_hot((chosen.cumsum(0) * chosen).max(-1).values - 1, len(x))
    combine = (gates * chosen)[..., None] * place[:, None].to(gates.dtype)
    given = torch.einsum("tep,tc->epc", combine.bool().to(x.dtype), x)
    return torch.einsum("tep,epc->tc", combine, torch.bmm(torch.bmm(given, m.up.mT).relu(), m.down.mT))


def sort_tokens(m: Parts, x: Tensor) -> Tensor:
    """Experts see the tokens in the order of the experts, and the results are put back."""
    x = x.flatten(0, 1)
    gates, chosen = m.route(x).softmax(-1).topk(2)
    order = chosen.flatten().argsort()
    made = m.line(x[order // 2])[order.argsort()]
    return (gates.unsqueeze(-1) * made.unflatten(0, (-1, 2))).sum(1)


def run_experts(m: Parts, x: Tensor, dim: int = -2) -> Tensor:
    return torch.stack([expert(x) for expert in m.experts], dim)


def gate_experts(m: Parts, x: Tensor) -> Tensor:
    """Those of the largest two gates."""
    gates = m.route(x).softmax(-1)
    values, chosen = gates.topk(2)
    gates = torch.zeros_like(gates).scatter(-1, chosen, values / values.sum(-1, keepdim=True))
    return torch.einsum("bte,btec->btc", gates, run_experts(m, x))


class Combine(nn.Module):
    """Outputs of experts, weighted in a module of its own by gates that it makes of other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * C, E)

    def forward(self, outputs: Tensor, *inputs: Tensor) -> Tensor:
        return (self.gate(torch.cat(inputs, -1)).softmax(-1).unsqueeze(-2) @ outputs).squeeze(-2)


EXPERTS = {
    "loops": loop_over_experts,
    "index_add_": index_tokens,
    "a batch of matrices": batch_tokens,
    "dispatched tokens": dispatch_tokens,
    "sorted tokens": sort_tokens,
    "the largest two": gate_experts,
    "all, by einsum": lambda m, x: torch.einsum("bte,btec->btc", m.route(x).softmax(-1), run_experts(m, x)),
    "all, by matmul": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-2) @ run_experts(m, x)).squeeze(-2),
    "all, by sums": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-1) * run_experts(m, x)).sum(-2),
    "a sum over the first axis": lambda m, x: (run_experts(m, x, 0) * m.route(x).softmax(-1).movedim(-1, 0)[..., None]).sum(0),
    "by exponentials": lambda m, x: torch.einsum(
        "bte,btec->btc", (e := m.route(x).exp()) / e.sum(-1, keepdim=True), run_experts(m, x)
    ),
    "of pooled tokens": lambda m, x: (m.route(x.mean(1)).softmax(-1).unsqueeze(-1) * run_experts(m, x.mean(1))).sum(1),
    "in one projection": lambda m, x: (m.score(x).softmax(-1).unsqueeze(-1) * m.wide(x).unflatten(-1, (K, C))).sum(-2),
    "by a gate of other inputs": lambda m, x: m.combine(run_experts(m, x), x, x.sin()),
    "by rows of another input": lambda m, x: m.route(x.flip(1).mean(1)).softmax(-1).unsqueeze(1) @ run_experts(m, x.mean(1), 1),
    "branches of convolutions": lambda m, x: (
        (y := torch.stack([m.one(x.mT[..., None]), m.other(x.mT[..., None])], 1))
        * y.sum(1, keepdim=True).mean((3, 4), keepdim=True).expand(-1, 2, -1, -1, -1).cumsum(1).softmax(1)
    ).sum(1),
    "dynamic kernels": lambda m, x: x @ torch.einsum("bk,kio->bio", m.route(x.mean(1)).softmax(-1), m.matrices),
}

# Codes, classes and losses.


def contrast(m: Parts, x: Tensor) -> Tensor:
    one, other = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, 1], dim=-1)
    return F.cross_entropy(one @ other.mT / 0.1, torch.arange(B))


def contrast_alike(m: Parts, x: Tensor) -> Tensor:
    one = F.normalize(x[:, 0], dim=-1)
    mask, logits = ((x[:, 0, :1] > 0) == (x[:, 0, :1] > 0).mT).float().fill_diagonal_(0), one @ one.mT / 0.1
    logarithms = logits - (logits.exp() * (1 - torch.eye(B))).sum(1, keepdim=True).log()
    return -((mask * logarithms).sum(1) / mask.sum(1).clamp(min=1)).mean()


def sample_token(m: Parts, x: Tensor) -> Tensor:
    probabilities = (x[:, -1:] @ m.codes.mT).softmax(-1)
    return probabilities @ m.codes + m.codes[torch.multinomial(probabilities[:, 0], 1)]


def draw_codes(m: Parts, x: Tensor) -> Tensor:
    weights = m.score(x).softmax(-1).flatten(0, 1)
    drawn = torch.multinomial(weights, 2)
    return F.embedding(drawn, m.codes) * weights.gather(1, drawn).unsqueeze(-1)


def quantize(m: Parts, x: Tensor) -> Tensor:
    nearest = m.codes[torch.cdist(x.flatten(0, 1), m.codes).argmin(-1)].view(x.shape)
    return x + (nearest - x).detach()


CODES = {
    "soft codes": lambda m, x: (-torch.cdist(x.flatten(0, 1), m.codes)).softmax(-1) @ m.codes,
    "the nearest codes": quantize,
    "hard codes": lambda m, x: torch.einsum("btk,kc->btc", F.gumbel_softmax(m.score(x), hard=True), m.codes),
    "picked codes": lambda m, x: (m.score(x).softmax(-1)[..., None] * m.codes[(x @ m.codes.mT).topk(K).indices]).sum(2),
    "drawn codes": draw_codes,
    "a sampled token": sample_token,
    "classes": lambda m, x: m.score(x).softmax(-1),
    "the mean of bins": lambda m, x: m.score(x).softmax(-1) @ torch.arange(float(K)),
    "clusters": lambda m, x: (a := m.score(x).softmax(-1)).mT @ x - a.sum(1).unsqueeze(-1) * m.codes,
    "a contrast": contrast,
    "a contrast of classes": contrast_alike,
    "distillation": lambda m, x: -(m.score(x).softmax(-1) * m.score(x + 1).log_softmax(-1)).sum(-1).mean(),
    "entropy": lambda m, x: -((w := m.score(x).softmax(-1)) * w.log()).sum(-1),
    "places of a heat map": lambda m, x: (m.score(x).mT.softmax(-1) * torch.arange(T)).sum(-1),
}

# Softmaxes over features, layers, shifts and windows that no token predicts.


def shift(x: Tensor, dim: int = 1, count: int = E) -> list[Tensor]:
    return [x.roll(n, dim) for n in range(count)]


def run_layers(m: Parts, x: Tensor) -> list[Tensor]:
    states = [x]
    for expert in m.experts[1:]:
        states.append(expert(states[-1]).tanh())
    return states


def restore_order(m: Parts, x: Tensor) -> Tensor:
    """Tokens that were shuffled are put back, and the groups of their features are gated."""
    order = x[..., 0].argsort(1)
    return (m.route(x).softmax(-1).unsqueeze(-1) * x[torch.arange(B)[:, None], order].unflatten(-1, (E, W))).sum(2)


def swap_tensors(m: Parts, x: Tensor) -> Tensor:
    """Tensors that are written into each other."""
    one, other = m.line(x).clone(), x.clone()
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    return (m.route(x).softmax(-1).unsqueeze(-1) * one.unsqueeze(2).expand(-1, -1, E, -1)).sum(2)


def unfold(x: Tensor, dim: int = 1) -> Tensor:
    return F.pad(x, (0, 0, E - 1, 0) if dim == 1 else (E - 1, 0)).unfold(dim, E, 1)


MIXES = {
    "channels": lambda m, x: x * m.line(x).softmax(-1) + x,
    "gated channels": lambda m, x: x * (m.line(x).tanh() * x.sigmoid()).softmax(1),
    "channels of pooled tokens": lambda m, x: x * x.mean(1, keepdim=True).softmax(-1),
    "a weight for each channel of tokens beside their mean": lambda m, x: torch.einsum(
        "btc,btc->bc", m.line((x - x.mean(1, keepdim=True)).tanh() + m.line(x)).softmax(1), x
    ),
    "chunks of features": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-1) * torch.stack(x.chunk(E, -1), 2)).sum(2),
    "tokens put back": restore_order,
    "tensors that change places": swap_tensors,
    "copies": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-1) * torch.stack([x] * E, 2)).sum(2),
    "a loop over two": lambda m, x: (w := m.route(x).softmax(-1))[..., :1] * x + w[..., 1:2] * x.roll(1, 1),
    "rolled features": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-2) * torch.stack(shift(x, -1), -1)).sum(-1),
    "windows of features": lambda m, x: (m.route(x).softmax(-1).unsqueeze(-2) * unfold(x, 2)).sum(-1),
    "a filter": lambda m, x: (m.kernel.softmax(0)[:, None] * torch.stack(shift(x), 2)).sum(2),
    "a light convolution": lambda m, x: unfold(x) @ m.kernel.softmax(0),
    "a filter for each sample": lambda m, x: torch.einsum("bk,btck->btc", m.route(x.mean(1)).softmax(-1), unfold(x)),
    "a correlation volume": lambda m, x: torch.stack([(x * one).mean(-1) for one in shift(m.line(x))], 1).softmax(1).mean(1),
    "pooling": lambda m, x: torch.stack(shift(x), 2).amax(2) * m.line(x).softmax(-1) + F.avg_pool1d(x.mT, 3, 1, 1).mT,
    "a warped image": lambda m, x: (
        F.grid_sample(x[:, None], m.route(x)[..., :2].tanh().unsqueeze(1), align_corners=False) * x.mean()
    ),
    "layers, by tensordot": lambda m, x: torch.tensordot(m.kernel.softmax(0), torch.stack(run_layers(m, x)), 1),
    "layers, by einsum": lambda m, x: torch.einsum("l,lbtc->btc", m.kernel.softmax(0), torch.stack(run_layers(m, x))),
    "layers, by sums": lambda m, x: (m.kernel.softmax(0).view(-1, 1, 1, 1) * torch.stack(run_layers(m, x))).sum(0),
    "layers, by matmul": lambda m, x: m.rows.softmax(-1) @ torch.stack(run_layers(m, x)).flatten(1),
    "routed layers": lambda m, x: torch.einsum("btl,btlc->btc", m.route(x).softmax(-1), torch.stack(run_layers(m, x), 2)),
    "scored layers": lambda m, x: ((y := torch.stack(run_layers(m, x), 2)) * m.route(y)[..., :1].softmax(2)).sum(2),
    "means of layers": lambda m, x: m.pool(torch.stack([state.mean(1) for state in run_layers(m, x)], 1)),
    "first tokens of layers": lambda m, x: m.pool(torch.cat([state[:, :1] for state in run_layers(m, x)], 1)),
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


class ScoredRows(nn.Module):
    """Pools rows that another module has joined."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1) * x).sum(1)


FORMS = EXPERTS | CODES | MIXES | ALGEBRA


@pytest.mark.parametrize("name", FORMS)
def test_softmaxes_and_products_that_are_no_attention_are_neither_recorded_nor_missed(name):
    torch.manual_seed(3)
    part, x = Parts(FORMS[name]), torch.randn(B, T, C)
    part.combine, part.pool = Combine(), ScoredRows()
    model = nn.Sequential(nn.Linear(C, C), part)
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            recording, _ = record_and_compare(model, lambda m: m(x))
        assert not recording.calls


def test_experts_whose_weights_are_arguments_are_no_attention():
    """As DBRX writes it: the weights of each expert are rows of a table, which another module is called with."""

    class Expert(nn.Module):
        def forward(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return (F.silu(x.matmul(gate.T)) * x.matmul(up.T)).matmul(down)

    def hand_over_weights(m: Parts, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        gates, out = m.route(x).softmax(-1), torch.zeros_like(x)
        for n in gates.argmax(-1).unique():
            (where,) = torch.where(gates.argmax(-1) == n)
            out.index_add_(0, where, m.expert(x[where], m.up[n], m.up[n - 1], m.down[n].mT) * gates[where, n, None])
        return out

    part = Parts(hand_over_weights)
    part.expert = Expert()
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


def test_streams_in_the_batch_that_a_matrix_for_each_token_mixes_are_no_attention():
    def connect(m: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
        streams = x.unflatten(0, (-1, 4)).movedim(1, 2)
        mixed = torch.einsum("btsn,btsc->btnc", m.to_five(F.layer_norm(streams, (C,))).softmax(-2), streams)
        return mixed[:, :, 0], mixed[:, :, 1:].movedim(2, 1).flatten(0, 1)

    def mix_folded(m: Parts, x: Tensor) -> Tensor:
        """Streams (b s, t, c) of tokens and of memory tokens before them."""
        streams = torch.cat([m.codes.expand(len(x), -1, -1), x], 1).repeat_interleave(4, 0)
        for connection in m.connections:
            one, streams = connection(streams)
            streams = streams + m.line(one).repeat_interleave(4, 0)
        return streams.unflatten(0, (-1, 4)).sum(1)[:, K:]

    part = Parts(mix_folded)
    part.connections = nn.ModuleList(Parts(connect) for _ in range(2))
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


def test_gates_of_tokens_that_another_module_picked_are_neither_recorded_nor_missed():
    class Picked(nn.Module):
        """A module of tokens of which each was picked twice."""

        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x[:, torch.arange(2 * T) // 2])

    gate = Parts(lambda m, x: (m.route(x).softmax(-1).unsqueeze(-1) * x.unflatten(-1, (E, W))).sum(-2))
    recording, _ = record_and_compare(nn.Sequential(Picked(gate)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls
