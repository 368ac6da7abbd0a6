"""Attention as people write it: from q, k, v (t, d) or (b, h, t, d), or from x (b, t, c) with weights of its own."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, T, D = 2, 3, 5, 7
C = H * D
ORDER = torch.tensor([3, 0, 4, 1, 2])
CAUSAL = torch.ones(T, T).tril().bool()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def replace_nan(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.zeros_like(x), x)


def loop_over_queries(q, k, v):
    return torch.stack([(k @ one).softmax(0) @ v for one in q])


def loops_of_the_first_lecture(q, k, v):
    weights = torch.empty(len(q), len(k))
    for i, query in enumerate(q):
        for j, key in enumerate(k):
            weights[i, j] = torch.dot(query, key)
    weights = torch.softmax(weights, dim=1)
    context = torch.zeros(v.shape)
    for i in range(len(q)):
        for j, value in enumerate(v):
            context[i] += weights[i, j] * value
    return context


def rows_that_are_joined(q, k, v):
    weights = torch.cat([(one[None] @ k.mT).softmax(-1) for one in q])
    return sum(weights[:, j, None] * v[j] for j in range(len(v)))


def growing_prefixes(q, k, v):
    return torch.cat([scores(q[i : i + 1], k[: i + 1]).softmax(-1) @ v[: i + 1] for i in range(len(q))])


def attend_into_a_buffer(q, k, v):
    out = torch.empty_like(v)
    for i in range(len(q)):
        out[i] = (q[i] @ k.mT).softmax(-1) @ v
    return out


def with_a_sink(q, k, v):
    joined = torch.cat([torch.zeros(len(q), 1), scores(q, k)], -1)
    return joined.softmax(-1)[:, 1:] @ v


def into_zeros_by_scatter(q, k, v):
    found, where = scores(q, k).topk(3)
    return torch.zeros(len(q), len(k)).scatter(-1, where, found.softmax(-1)) @ v


def into_weights_in_place(q, k, v):
    s = scores(q, k)
    s.masked_fill_(~CAUSAL, -torch.inf).sub_(s.max(-1, keepdim=True).values).exp_()
    s.div_(s.sum(-1, keepdim=True))
    return torch.mm(s, v)


@torch.no_grad()
def out_of_place(q, k, v):
    out, weights = torch.empty(len(q), v.shape[1]), torch.empty(len(q), len(k))
    torch.mm(q, k.mT, out=weights)
    torch.mm(torch.softmax(weights, -1), v, out=out)
    return out


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.softmax(x, -1)


class Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, v):
        return w @ v


class HookPoint(nn.Module):
    """A module that hooks are put on, which returns what it is given, as TransformerLens has them."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def list_unbatched_forms() -> dict[str, object]:
    """Of q, k and v (t, d): what a grammar of products, layouts and softmaxes does not have."""
    return {
        "mv": lambda q, k, v: torch.mv(v.t(), torch.mv(k, q[0]).softmax(0)),
        "einsum of the transposed": lambda q, k, v: torch.einsum("ij,ie", torch.einsum("id,jd", k, q).softmax(0), v),
        "einsum by numbers": lambda q, k, v: torch.einsum((q @ k.T).softmax(-1), [0, 1], v, [1, 2], [0, 2]),
        "einsum of a list": lambda q, k, v: torch.einsum("qk,kd->qd", [torch.einsum("qd,kd->qk", [q, k]).softmax(-1), v]),
        "inner": lambda q, k, v: torch.inner(torch.inner(q, k).softmax(-1), v.T),
        "multi_dot": lambda q, k, v: torch.linalg.multi_dot([(q @ k.T).softmax(-1), v, torch.eye(D)]),
        "vecdot": lambda q, k, v: torch.linalg.vecdot(q[:, None], k[None]).softmax(-1) @ v,
        "mean": lambda q, k, v: ((q @ k.T).softmax(-1)[..., None] * v).mean(1) * T,
        "names of numpy": lambda q, k, v: ((q @ k.T).softmax(axis=-1)[..., None] * v[None]).sum(axis=1),
        "exponentials by names of numpy": lambda q, k, v: (e := (q @ k.T).exp()) / e.sum(axis=-1, keepdims=True) @ v,
        "cdist": lambda q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v,
        "squared distances": lambda q, k, v: (-(q[:, None] - k[None]).pow(2).sum(-1)).softmax(-1) @ v,
        "cosine": lambda q, k, v: F.cosine_similarity(q[:, None], k[None], dim=-1).softmax(-1) @ v,
        "normalised": lambda q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T * 10).softmax(-1) @ v,
        "softmin": lambda q, k, v: F.softmin(-(q @ k.T), -1) @ v,
        "both directions": lambda q, k, v: ((q @ k.T) + (q @ k.T).T).softmax(-1) @ v,
        "pow": lambda q, k, v: ((q @ k.T) ** 2).softmax(-1) @ v,
        "weights to a power": lambda q, k, v: (q @ k.T).softmax(-1).pow(2) @ v,
        "relu": lambda q, k, v: F.relu(q @ k.T) / T @ v,
        "squared relu": lambda q, k, v: (q @ k.T).clamp(min=0).square() @ v,
        "nn.ReLU": (lambda q, k, v, act: act(q @ k.T) / T @ v, nn.ReLU()),
        "sigmoid": lambda q, k, v: torch.sigmoid(q @ k.T - math.log(T)) @ v,
        "gumbel": lambda q, k, v: F.gumbel_softmax(q @ k.T, dim=-1) @ v,
        "in float32": lambda q, k, v: F.softmax(q @ k.T, dim=-1, dtype=torch.float32).to(v.dtype) @ v,
        "powers of 2 in place": lambda q, k, v: (e := (q @ k.T / math.log(2)).exp2_()) / e.sum(-1, keepdim=True) @ v,
        "2 ** x, divided late": lambda q, k, v: (e := 2 ** (q @ k.T / math.log(2))) @ v / e.sum(-1, keepdim=True),
        "in place": into_weights_in_place,
        "out=": out_of_place,
        "stack": lambda q, k, v: torch.stack([(q @ k.T).softmax(-1), (k @ q.T).softmax(-1)]) @ v,
        "top k into zeros": into_zeros_by_scatter,
        "a sink": with_a_sink,
        "a mask of weights": lambda q, k, v: (w := scores(q, k).softmax(-1).tril()) / w.sum(-1, keepdim=True) @ v,
        "a loop over queries": loop_over_queries,
        "loops over pairs": loops_of_the_first_lecture,
        "a loop over keys": rows_that_are_joined,
        "growing prefixes": growing_prefixes,
        "into a buffer": attend_into_a_buffer,
        "autograd functions": lambda q, k, v: Weigh.apply(Softmax.apply(q @ k.T), v),
        "aten": lambda q, k, v: torch.ops.aten.mm(torch.ops.aten._softmax(torch.ops.aten.mm(q, k.T), -1, False), v),
        "with keys and values alike": lambda q, k, v: (k @ k.T).softmax(-1) @ k,
    }


def list_batched_forms() -> dict[str, object]:
    """Of q, k and v (b, h, t, d)."""
    return {
        "@": lambda q, k, v: scores(q, k).softmax(-1) @ v,
        "a loop over heads": lambda q, k, v: torch.cat([scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(H)], -1),
        "a loop over the batch": lambda q, k, v: torch.stack(
            [scores(*qk).softmax(-1) @ w for *qk, w in zip(q, k, v, strict=True)]
        ),
        "a matrix between tokens": (lambda q, k, v, mix: (q @ mix.weight @ k.mT).softmax(-1) @ v, nn.Linear(D, D)),
        "a matrix between tokens, by einsum": (
            lambda q, k, v, mix: (
                torch.einsum("bhqe,bhke->bhqk", torch.einsum("bhqd,de->bhqe", q, mix.weight), k).softmax(-1) @ v
            ),
            nn.Linear(D, D),
        ),
        "talking heads": (
            lambda q, k, v, mix: mix(scores(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1) @ v,
            nn.Linear(H, H),
        ),
        "hook points": (
            lambda q, k, v, hook: hook(replace_nan(hook(hook(scores(q, k)).masked_fill(~CAUSAL, -torch.inf).softmax(-1)))) @ v,
            HookPoint(),
        ),
        "no NaN in scores": lambda q, k, v: (s := scores(q, k)).masked_fill(s.isnan(), 0.0).softmax(-1) @ v,
        "talking weights": (lambda q, k, v, mix: mix(scores(q, k).softmax(-1)) @ v, nn.Conv2d(H, H, 1)),
        "differential": lambda q, k, v: (scores(q, k).softmax(-1) - 0.5 * scores(k, q).softmax(-1)) @ v,
        "of the mean over heads": lambda q, k, v: scores(q, k).softmax(-1).mean(1, keepdim=True) @ v,
        "one query": lambda q, k, v: scores(q[:, :, -1:], k).softmax(-1) @ v,
        "one query, summed": lambda q, k, v: (scores(q[:, :, -1:], k).softmax(-1).mT * v).sum(2),
        "local windows": lambda q, k, v: (
            (q.unsqueeze(-2) @ F.pad(k, (0, 0, 1, 1)).unfold(2, 3, 1)).softmax(-1)
            @ F.pad(v, (0, 0, 1, 1)).unfold(2, 3, 1).transpose(-1, -2)
        ),
        "two hops": lambda q, k, v: ((w := scores(q, k).softmax(-1)) @ w) @ v,
        "two hops of two softmaxes": lambda q, k, v: (scores(q, k).softmax(-1) @ scores(k, q).softmax(-1)) @ v,
        "over channels": lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT,
        "an Nyström form": lambda q, k, v: (
            scores(q, k[:, :, :2]).softmax(-1)
            @ scores(q[:, :, :2], k[:, :, :2]).softmax(-1).pinverse()
            @ (scores(q[:, :, :2], k).softmax(-1) @ v)
        ),
    }


class Own(nn.Module):
    """A form within a module, that projects q, k and v: (t, d) of x (t, c), or (b, h, t, d) of x (b, t, c)."""

    def __init__(self, form) -> None:
        super().__init__()
        self.project = nn.Linear(C, 3 * C)
        self.form, self.part = form if isinstance(form, tuple) else (form, None)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            q, k, v = self.project(x)[..., : 3 * D].split(D, -1)
        else:
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        self.values = v.detach()
        return self.form(q, k, v) if self.part is None else self.form(q, k, v, self.part)


class Prompt(nn.Module):
    """PEFT's AdaptionPrompt: what attends as it did looks at learned tokens too, gated. https://arxiv.org/abs/2303.16199"""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)
        self.prompt, self.gate = nn.Parameter(torch.randn(1, 4, C)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (self.q(x), self.k(self.prompt), self.v(self.prompt)))
        k, v = k.repeat(len(x), 1, 1, 1), v.repeat(len(x), 1, 1, 1)
        weights = self.gate * F.softmax((q @ k.mT / math.sqrt(D)).float(), dim=-1)
        return x + (weights @ v).transpose(1, 2).flatten(2)


class OnePrompt(Prompt):
    """The same of the last token alone, as a step of a generation computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, -1:])


class Latents(nn.Module):
    """Learned queries that read what there is, as in Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.latents = nn.Linear(C, D), nn.Linear(C, D), nn.Parameter(torch.randn(1, C))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(self.latents) @ self.k(x).mT).softmax(-1) @ x


class OneHotTokens(nn.Module):
    """Tokens that are rows of zeros and ones, which a query reads as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.W_query = nn.Linear(C, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.one_hot(x.argmax(-1), C).to(x.dtype)
        return (self.W_query(x) @ x.mT).softmax(-1) @ x


class Graph(nn.Module):
    """Attention of a graph's nodes, dense: a sum of a score of each node. https://arxiv.org/abs/1710.10903"""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(C, 1), nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.left(x) + self.right(x).mT).softmax(-1) @ x


class ScoredPairs(nn.Module):
    """A network that scores pairs, without an axis of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(2 * C, D), nn.Tanh(), nn.Linear(D, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x[0]
        pairs = torch.cat([x.unsqueeze(1).expand(-1, T, -1), x.unsqueeze(0).expand(T, -1, -1)], -1)
        return self.score(pairs).squeeze(-1).softmax(-1) @ x


class Additive(nn.Module):
    """Additive attention, without an axis of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.weight = nn.Linear(C, D), nn.Linear(C, D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x[0]
        return (torch.tanh(self.q(x)[:, None] + self.k(x)[None]) @ self.weight).softmax(-1) @ x


class Separate(nn.Module):
    """Its weights are computed by a module of their own."""

    class Weights(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return scores(q, k).softmax(-1)

    def __init__(self) -> None:
        super().__init__()
        self.weights = self.Weights()

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x, x) @ x


class KeptKeys(nn.Module):
    """Keys and values are written into buffers, by parts of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(B, 2 * T, C))
        self.register_buffer("values", torch.zeros(B, 2 * T, C))

    def forward(self, x: Tensor) -> Tensor:
        self.keys[:, :T] = x
        self.values.narrow(1, 0, T).copy_(x)
        return (x[:, -1:] @ self.keys[:, :T].mT).softmax(-1) @ self.values[:, :T]


MODULES = [Prompt, OnePrompt, Latents, Graph, ScoredPairs, Additive, Separate, KeptKeys, OneHotTokens]
