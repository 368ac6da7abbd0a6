"""Modules with softmaxes, products and sums that are no attention: experts, codebooks, losses, poolings, norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

B, T, C, E, K = 2, 5, 12, 3, 7


class Expert(nn.Module):
    """An expert whose weights are arguments."""

    def forward(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x.matmul(gate.T)) * x.matmul(up.T)).matmul(down)


class Experts(nn.Module):
    """A router, and experts as models write them."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.router = style, nn.Linear(C, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * C, C)), nn.Parameter(torch.randn(E, C, 2 * C))
        self.table, self.expert = nn.Parameter(torch.randn(3 * E * 2 * C, C)), Expert()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return getattr(self, self.style)(x, self.router(x).softmax(-1))

    def loop_over_experts(self, x: Tensor, gates: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for n in range(E):
            out = out + gates[:, n, None] * F.linear(F.silu(F.linear(x, self.up[n])), self.down[n])
        return out

    def index_tokens(self, x: Tensor, gates: Tensor) -> Tensor:
        values, chosen = gates.topk(2)
        values = values / values.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for n in chosen.unique():
            where, place = torch.where(chosen == n)
            out.index_add_(
                0, where, F.linear(F.relu(F.linear(x[where], self.up[n])), self.down[n]) * values[where, place, None]
            )
        return out

    def batch_tokens(self, x: Tensor, gates: Tensor) -> Tensor:
        values, chosen = gates.topk(2)
        up, down = self.up[chosen.flatten()], self.down[chosen.flatten()]
        made = torch.bmm(down, torch.bmm(up, x.repeat_interleave(2, 0).unsqueeze(-1)).relu()).squeeze(-1)
        return (made * values.flatten().unsqueeze(-1)).view(len(x), 2, C).sum(1)

    def compute_all_experts(self, x: Tensor, gates: Tensor) -> Tensor:
        made = torch.einsum("ech,teh->tec", self.down, torch.einsum("ehc,tc->teh", self.up, x).relu())
        return torch.bmm(gates.unsqueeze(1), made).squeeze(1)

    def repeat_tokens(self, x: Tensor, gates: Tensor) -> Tensor:
        made = torch.bmm(torch.bmm(x.expand(E, -1, -1), self.up.mT).sigmoid(), self.down.mT)
        return (made * gates.T.unsqueeze(-1)).sum(0)

    def activate_gates(self, x: Tensor, gates: Tensor) -> Tensor:
        return self.compute_all_experts(x, F.relu(gates.log() + self.router(x)[:, :1]).softmax(-1))

    def hand_over_weights(self, x: Tensor, gates: Tensor) -> Tensor:
        """As DBRX writes it: the weights of each expert are rows of a table, which another module is called with."""
        chosen, out = gates.argmax(-1), torch.zeros_like(x)
        for n in chosen.unique():
            (where,) = torch.where(chosen == n)
            weights = self.table.view(3, E, 2 * C, C)[:, n]
            out.index_add_(0, where, self.expert(x[where], *weights) * gates[where, n, None])
        return out

    def dispatch_tokens(self, x: Tensor, gates: Tensor) -> Tensor:
        """As GShard and Switch write it: which token goes to which place of which expert is a mask."""
        chosen = F.one_hot(gates.argmax(-1), E)
        place = F.one_hot((chosen.cumsum(0) * chosen).max(-1).values - 1, len(x))
        combine = (gates * chosen)[..., None] * place[:, None].to(gates.dtype)
        given = torch.einsum("tep,tc->epc", combine.bool().to(x.dtype), x)
        made = torch.bmm(torch.bmm(given, self.up.mT).relu(), self.down.mT)
        return torch.einsum("tep,epc->tc", combine, made)


class Codebook(nn.Module):
    """Vectors quantised softly, or by a draw."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.score = style, nn.Linear(C, K)
        self.codes = nn.Parameter(torch.randn(K, C))
        self.register_buffer("mean_codes", torch.randn(K, C))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.mean_codes if self.style == "buffer" else self.codes
        if self.style == "gumbel":
            return torch.einsum("btk,kc->btc", F.gumbel_softmax(self.score(x), hard=True), codes)
        if self.style == "hard":
            distances = torch.cdist(x.flatten(0, 1), codes)
            found = codes[distances.argmin(-1)].view(x.shape)
            return x + (found - x).detach()
        return (-torch.cdist(x.flatten(0, 1), codes)).softmax(-1) @ codes


class Loss(nn.Module):
    """Losses of pairs, and of distributions."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.head = style, nn.Linear(C, K)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.normalize(x[:, 0], dim=-1), F.normalize(x[:, 1], dim=-1)
        if self.style == "contrast":
            return F.cross_entropy(one @ other.mT / 0.1, torch.arange(B))
        if self.style == "supervised contrast":
            alike = (x[:, 0, :1] > 0) == (x[:, 0, :1] > 0).mT
            mask = alike.float().fill_diagonal_(0)
            logits = one @ one.mT / 0.1
            logarithms = logits - (logits.exp() * (1 - torch.eye(B))).sum(1, keepdim=True).log()
            return -((mask * logarithms).sum(1) / mask.sum(1).clamp(min=1)).mean()
        if self.style == "sigmoids":
            return -F.logsigmoid((one @ other.mT) * (2 * torch.eye(B) - 1)).sum()
        if self.style == "distillation":
            teacher, student = self.head(x).softmax(-1), self.head(x + 1).log_softmax(-1)
            return -(teacher * student).sum(-1).mean()
        if self.style == "entropy":
            weights = self.head(x).softmax(-1)
            return -(weights * weights.log()).sum(-1)
        smooth = torch.full((B, T, K), 0.1 / K).scatter(-1, torch.zeros(B, T, 1, dtype=torch.long), 0.9)
        return -(smooth * self.head(x).log_softmax(-1)).sum(-1).mean()


class Mix(nn.Module):
    """Softmaxes along axes that are no keys: of branches, components, clusters, places with known coordinates."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.score, self.other = style, nn.Linear(C, K), nn.Linear(C, K * C)
        self.weight, self.centres = nn.Parameter(torch.randn(K, C, C)), nn.Parameter(torch.randn(K, C))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).softmax(-1)  # (b, t, k)
        if self.style == "density":
            return (weights.unsqueeze(-1) * self.other(x).unflatten(-1, (K, C))).sum(-2)
        if self.style == "softmaxes":
            return (weights.unsqueeze(-1) * self.other(x).unflatten(-1, (K, C)).softmax(-1)).sum(-2)
        if self.style == "clusters":
            assigned = weights.mT @ x - weights.sum(1).unsqueeze(-1) * self.centres
            return F.normalize(assigned.flatten(1), dim=-1)
        if self.style == "dynamic kernels":
            pooled = self.score(x.mean(1)).softmax(-1)
            return x @ torch.einsum("bk,kio->bio", pooled, self.weight)
        if self.style == "branches":
            gates = torch.stack([self.score(x.mean(1)), self.score(x.amax(1))], 1).softmax(1)
            return (gates.unsqueeze(2) * torch.stack([self.score(x), self.score(-x)], 1)).sum(1)
        if self.style == "places":
            heat = self.score(x).mT.softmax(-1)
            return heat @ torch.linspace(-1, 1, T), (heat * torch.arange(T)).sum(-1)
        if self.style == "channels":
            return x * self.other(x)[..., :C].softmax(-1) + x
        if self.style == "gated channels":
            return x * (self.other(x)[..., :C].tanh() * x.sigmoid()).softmax(1)
        if self.style == "wide channels":
            return ((self.other(x) + self.other(x.flip(1))).softmax(1) * self.other(x)).sum(1)
        assert self.style == "bins"
        enlarged = F.interpolate(x[:, : T // 2].mT, T) + x.mT  # (b, c, t)
        return (enlarged.softmax(1) * x.mean(1).unsqueeze(-1)).sum(1)


class Branches(nn.Module):
    """Weights of parallel convolutions (https://arxiv.org/abs/1903.06586), of parts of the channels of one, or of matrices."""

    class Select(nn.Module):
        """A softmax over two branches for each channel, from a pooled picture."""

        def __init__(self) -> None:
            super().__init__()
            self.reduce, self.norm, self.select = nn.Conv2d(C, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2 * C, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.norm(self.reduce(x.mean((2, 3), keepdim=True))).relu()
            return self.select(pooled).unflatten(1, (2, C)).softmax(1)

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.select = style, self.Select().eval()
        self.one, self.other, self.both = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, 2 * C, 1)
        self.score, self.matrices = nn.Linear(C, 2), nn.Linear(C, 2 * C)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "matrices by differences of tokens":
            first, second = (x.flatten(0, 1).index_select(0, index) for index in (torch.arange(30) % 10, torch.arange(30) // 3))
            weights = self.score(second - first).softmax(1)
            return (weights.unsqueeze(-1) * self.matrices(second).unflatten(-1, (2, C))).sum(1)
        picture = x.mT.unsqueeze(-1)  # (b, c, t, 1)
        if self.style == "parallel convolutions":
            found = torch.stack([self.one(picture), self.other(picture)], 1)
        else:
            assert self.style == "parts of channels"
            found = self.both(picture).unflatten(1, (2, C))
        return (found * self.select(found.sum(1))).sum(1)


class Algebra(nn.Module):
    """Products of what was computed, without weights; and weights that were computed."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project = style, nn.Linear(C, 3 * C)
        self.up, self.down = nn.Parameter(torch.randn(2 * C, C)), nn.Parameter(torch.randn(C, 2 * C))
        self.a, self.b = nn.Parameter(torch.randn(2, C)), nn.Parameter(torch.randn(2 * C, 2))
        self.gain = nn.Parameter(torch.ones(C))
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        if self.style == "a mixer whose weights tokens make":  # https://arxiv.org/abs/2203.03691
            return q @ F.gelu(k.mT @ x)
        if self.style == "a mixer whose layers tokens make":
            return q @ self.activation(k.mT @ v)
        if self.style == "a guarded norm of differences":
            far = (x.unsqueeze(2) - x.unsqueeze(1)).norm(dim=-1, keepdim=True)
            near = (x.unsqueeze(2) - x.unsqueeze(1)) / far.clamp(min=1e-12)
            return self.project(near).sum(2)
        if self.style == "angles":
            cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
            return torch.acos(cosines.clamp(min=-1.0, max=1.0)).mean((1, 2))
        if self.style == "turns by angles":  # as of https://arxiv.org/abs/2206.11990
            far = x[:, :, None, :9].unflatten(-1, (3, 3)) - x[:, None, :, :9].unflatten(-1, (3, 3))
            axis = F.normalize((far * far.mean(-2, keepdim=True)).sum(-1), dim=-1).clamp(-1.0, 1.0)
            angle = torch.atan2(axis[..., 0], axis[..., 2])
            zero, one = torch.zeros_like(angle), torch.ones_like(angle)
            rows = (angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero, zero, zero, one)
            return torch.stack(rows, -1).unflatten(-1, (3, 3)).mT @ far
        if self.style == "whitening":
            gram = x.mT @ x / T
            for _ in range(3):
                gram = 1.5 * gram - 0.5 * gram @ gram @ gram
            return x @ gram
        if self.style == "whitening by vectors":
            sizes, vectors = torch.linalg.eigh(x.mT @ x / T)
            return x @ vectors @ torch.diag_embed(sizes.clamp(min=1e-3).rsqrt()) @ vectors.mT
        if self.style == "whitening by scaled vectors":
            _, sizes, vectors = torch.linalg.svd(x.mT @ x / T)
            return x @ (vectors * sizes.clamp(min=1e-3).rsqrt().unsqueeze(-1))
        if self.style.endswith("triangles"):
            n = 3 if self.style == "small triangles" else T
            return (q[:, :n, :n].tril() @ k[:, :n, :n].tril()) @ v[:, :n]
        if self.style == "rotations":
            turn = torch.linalg.qr(q[:, :3, :3]).Q @ torch.linalg.qr(k[:, :3, :3]).Q
            return turn @ v[:, :3]
        if self.style == "bilinear pooling":
            pooled = (q.mT @ v).flatten(1)
            return F.normalize(pooled.sign() * pooled.abs().sqrt(), dim=-1)
        if self.style == "a merged adapter":
            return F.linear(F.relu(F.linear(x, self.up + self.b @ self.a)), self.down + self.a.mT @ self.b.mT)
        if self.style == "modulated weights":
            weight = self.up[None] * x.mean(1)[:, None]
            return F.leaky_relu(x @ weight.mT) @ self.down.mT
        if self.style == "a norm":
            y = (x - x.mean(-1, keepdim=True)) / ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).add(1e-5).sqrt()
            y = y * (y * q).pow(2).mean(-1, keepdim=True).add(1e-5).pow(-0.5) * self.gain
            return y.mean(1), y.sum(-1)
        if self.style == "a mean of masked copies":
            mask = (x[..., :1] > 0).to(x.dtype).expand_as(x).clone()
            return (F.relu(self.project(mask.mul_(x).sum(1))).unsqueeze(1) * torch.cat([q, k, v], -1)).sum(1)
        if self.style == "gated copies":
            copies = x.unsqueeze(1).expand(-1, T, -1, -1).clone().mul_(q.unsqueeze(2))
            return F.relu(copies.sum(2)) @ F.relu(copies.sum(1)).mT
        if self.style == "a gate":
            return x + torch.sigmoid((q * k).sum(-1, keepdim=True)) * v
        if self.style == "a machine of factors":
            return torch.sigmoid((q * k).sum(-1) + (q.sum(1).pow(2) - q.pow(2).sum(1)).sum(-1, keepdim=True))
        assert self.style == "a pooled tower"
        mask = (x[..., :1] > 0).float()
        pooled = torch.tanh((x * mask).sum(1) / mask.sum(1).clamp(min=1))
        return pooled @ F.normalize(v.mean(1), dim=-1).mT


class Transitions(nn.Module):
    """Products of positive matrices that a layer makes, as those of a Markov chain."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.of_tokens = style, nn.Linear(C, 3 * K * K), nn.Linear(C, 3 * T)

    def forward(self, x: Tensor) -> Tensor:
        if "tokens" in self.style:
            parts = self.of_tokens(x).chunk(3, -1)
            if "alone" in self.style:
                one, two, three = (part.exp() / part.exp().sum(-1, keepdim=True) for part in parts)
                return one @ (two @ three) if "last" in self.style else one @ two @ three
            made = torch.stack(parts)
        else:
            made = self.project(x if "each token" in self.style else x.mean(1)).unflatten(-1, (3, K, K)).movedim(-3, 0)
        made = made.softmax(-1) if "softmax" in self.style else made.relu() + 1e-3
        one, two, three = made / made.sum(-1, keepdim=True)
        if "power" in self.style:
            return one @ one @ one
        return one @ (two @ three) if "last" in self.style else one @ two @ three


class Skinning(nn.Module):
    """Points that move with a sum of the matrices of joints, with weights that a layer predicts."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.weigh, self.move = style, nn.Linear(C, E), nn.Linear(C, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights, matrices = self.weigh(x).relu(), self.move(x[:, :E]).exp().unflatten(-1, (4, 4))  # (b, t, e), (b, e, 4, 4)
        if self.style == "of one cloud":
            return (torch.tensordot(weights[0], matrices[0], 1) @ x[0, :, :4, None]).squeeze(-1)
        blended = torch.einsum("bte,beij->btij", weights, matrices)
        return torch.einsum("btij,btj->bti", blended, x[..., :4].exp())


class Streams(nn.Module):
    """Hyper-connections: residual streams that layers mix by weights of each token. https://arxiv.org/abs/2409.19606"""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.layer, self.mix, self.alpha = style, nn.Linear(C, C), nn.Linear(C, 5), nn.Parameter(torch.randn(4, 5))
        self.weigh = nn.Linear(4 * C, 24)

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unsqueeze(2).repeat(1, 1, 4, 1)
        for _ in range(2):
            if self.style == "of each stream":
                mixed = (self.mix(F.layer_norm(streams, (C,))).tanh() * 0.1 + self.alpha).mT @ streams
                streams = mixed[:, :, 1:] + self.layer(mixed[:, :, 0]).unsqueeze(2)
                continue
            before, after, mixing = self.weigh(streams.flatten(2)).split([4, 4, 16], -1)
            mixing = mixing.unflatten(-1, (4, 4))
            if self.style == "as in a Sinkhorn iteration":
                mixing = mixing.exp() / mixing.exp().sum(-1, keepdim=True)
                mixing = mixing / mixing.sum(-2, keepdim=True)
            else:
                mixing = mixing.softmax(-1) if self.style == "softmax" else mixing.sigmoid()
            made = self.layer((before.sigmoid().unsqueeze(-2) @ streams).squeeze(-2))
            streams = mixing @ streams
            if self.style != "mixed alone":
                streams = streams + after.unsqueeze(-1) * made.unsqueeze(2)
        return streams.sum(2)


class Connection(nn.Module):
    """Streams (b s, t, c), in the batch of the argument, that a matrix for each token mixes."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.mix, self.alpha = style, nn.Linear(C, 5), nn.Parameter(torch.randn(4, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        streams = x.unflatten(0, (-1, 4)).movedim(1, 2)
        alpha = self.mix(F.layer_norm(streams, (C,))) + self.alpha
        if self.style == "in the batch, a softmax":
            alpha = alpha.softmax(-2)
        elif self.style == "in the batch, a Sinkhorn iteration":
            alpha = F.normalize(F.normalize(alpha.exp(), p=1, dim=-2), p=1, dim=-1)
        mixed = torch.einsum("btsn,btsc->btnc", alpha, streams)
        return mixed[:, :, 0], mixed[:, :, 1:].movedim(2, 1).flatten(0, 1)


class FoldedStreams(nn.Module):
    """Hyper-connections of tokens and of memory tokens that are put before them."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.memory, self.layer = nn.Parameter(torch.randn(3, C)), nn.Linear(C, C)
        self.connections = nn.ModuleList(Connection(style) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        streams = tokens.repeat_interleave(4, 0)
        for connection in self.connections:
            one, streams = connection(streams)
            streams = streams + self.layer(one).repeat_interleave(4, 0)
        return streams.unflatten(0, (-1, 4)).sum(1)[:, 3:]


class NormedWeights(nn.Module):
    """A feedforward layer whose weights are computed by modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = weight_norm(nn.Linear(C, 2 * C)), weight_norm(nn.Linear(2 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(self.up(x)), self.down.weight)


class Rotary(nn.Module):
    """Positions that are handed over with their frequencies, beside a kernel that is recorded."""

    class Turn(nn.Module):
        def forward(self, x: Tensor, places: Tensor, frequencies: Tensor) -> Tensor:
            angles = (places[:, :, None] * frequencies[None, None]).repeat_interleave(2, -1)
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
            return x * angles.cos() + turned * angles.sin()

    def __init__(self) -> None:
        super().__init__()
        self.project, self.turn = nn.Linear(C, 3 * C), self.Turn()

    def forward(self, x: Tensor) -> Tensor:
        places, frequencies = torch.arange(T).float().expand(B, T), torch.arange(C // 2).neg().exp()
        q, k, v = self.project(x).chunk(3, -1)
        q, k = (self.turn(y, places, frequencies) for y in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


def list_modules() -> dict[str, nn.Module]:
    """Those of which nothing may be told."""
    styles = {
        Experts: [
            "loop_over_experts",
            "index_tokens",
            "batch_tokens",
            "compute_all_experts",
            "repeat_tokens",
            "activate_gates",
            "dispatch_tokens",
            "hand_over_weights",
        ],
        Codebook: ["soft", "buffer", "gumbel", "hard"],
        Loss: ["contrast", "supervised contrast", "sigmoids", "distillation", "entropy", "smoothed labels"],
        Mix: [
            "density",
            "softmaxes",
            "clusters",
            "dynamic kernels",
            "branches",
            "places",
            "channels",
            "gated channels",
            "wide channels",
            "bins",
        ],
        Branches: ["parallel convolutions", "parts of channels", "matrices by differences of tokens"],
        Algebra: [
            *(
                "whitening",
                "whitening by vectors",
                "whitening by scaled vectors",
                "rotations",
                "bilinear pooling",
                "a merged adapter",
                "modulated weights",
            ),
            *(
                "a mixer whose weights tokens make",
                "a mixer whose layers tokens make",
                "a guarded norm of differences",
                "angles",
                "turns by angles",
            ),
            *("a mean of masked copies", "gated copies"),
            *("a norm", "a gate", "a machine of factors", "a pooled tower", "triangles", "small triangles"),
        ],
        Transitions: [
            *("softmax", "softmax, last first", "softmax, power", "relu", "softmax of each token", "relu of each token"),
            *("relu of each token, last first", "relu of tokens", "relu of tokens, last first", "softmax of tokens"),
            *("exponentials of tokens, each alone", "exponentials of tokens, each alone, last first"),
        ],
        Skinning: ["of one cloud", "of a batch"],
        Streams: ["of each stream", "as in a Sinkhorn iteration", "softmax", "sigmoid", "mixed alone"],
        FoldedStreams: ["in the batch", "in the batch, a softmax", "in the batch, a Sinkhorn iteration"],
    }
    found = {f"{kind.__name__}: {style}": kind(style) for kind, names in styles.items() for style in names}
    return found | {"NormedWeights": NormedWeights(), "Rotary": Rotary()}
