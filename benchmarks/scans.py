"""The overview of one causal head against the same numbers from blocks of rows, in JAX, in torch, and in torch compiled.

Each reads the keys up to the end of a quarter of the rows, as a causal head allows, and computes every number of an overview:
the statistics of rows, the sums of columns, and the picture. Memory grows with T, as it does for a map.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.maps import WIDTH, concatenate_overview
from benchmarks.tables import Table
from benchmarks.timing import time_contenders

TITLE = "overview of one causal head of width 64 beside blocks of rows in JAX and in torch, float32"
COLUMNS = [
    "T",
    "fused ms",
    "JAX's scan ms",
    "torch in blocks ms",
    "torch.compile ms",
    "overview ms",
    "JAX's to overview",
    "overview to fused",
    "share of peak",
]
LENGTHS, QUARTERS, BLOCK, BINS = (4096, 16_384), 4, 256, 256


def run(peak: dict[torch.dtype, float]) -> Table:
    """Milliseconds of all, proven equal; the share of the peak counts the products alone."""
    table = Table(TITLE, COLUMNS)
    for t in LENGTHS:
        q, k, v = (torch.randn(1, 1, t, WIDTH) for _ in range(3))
        compiled = torch.compile(compute_block, dynamic=False)
        ways = {
            "overview": partial(concatenate_overview, q, k),
            "jax": partial(compute_in_jax, q, k),
            "blocks": partial(compute_in_torch, q, k, compute_block),
            "compiled": partial(compute_in_torch, q, k, compiled),
        }
        fused = {"fused": partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)}
        found = time_contenders(ways, 2e-3, beside=fused).medians
        ours, share = found["overview"], t * t * WIDTH / (found["overview"] / 1e3) / 1e9 / peak[torch.float32]
        times = (found[name] for name in ("fused", "jax", "blocks", "compiled", "overview"))
        table.add(t, *times, found["jax"] / ours, ours / found["fused"], share)
    return table


def compute_in_torch(q: Tensor, k: Tensor, compute: Any) -> Tensor:
    """All numbers of an overview one after the other, as `concatenate_overview` has them; `compute` is for a block of rows."""
    q, k = q[0, 0], k[0, 0]
    t = len(q)
    rows, received, mean, most = [], q.new_zeros(t), q.new_zeros(BINS, BINS), q.new_zeros(BINS, BINS)
    for first in range(0, t, BLOCK):
        end = find_end(first, t)
        own, sums, means, largest = compute(q[first : first + BLOCK], k[:end], torch.tensor(first), t)
        rows.append(own)
        received[:end] += sums
        bins = slice(first * BINS // t, (first + BLOCK) * BINS // t)
        mean[bins, : means.shape[1]], most[bins, : means.shape[1]] = means, largest
    return torch.cat([torch.cat(rows, 1).flatten(), received, mean.flatten(), most.flatten()])


def compute_block(q: Tensor, k: Tensor, first: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of a block of rows (7, rows), and its sums by key, means and maxima by bin."""
    i, j = torch.arange(len(q)) + first, torch.arange(len(k))
    s = (q @ k.T / WIDTH**0.5).masked_fill(j > i.unsqueeze(1), -torch.inf)
    logsumexp = s.logsumexp(-1)
    w = (s - logsumexp.unsqueeze(-1)).exp()
    entropy = logsumexp - (w * s.clamp_min(-1e30)).sum(-1)
    distance = i - w @ j.float()
    itself = w.gather(1, i.unsqueeze(1)).squeeze(1)
    previous = w.gather(1, (i - 1).clamp_min(0).unsqueeze(1)).squeeze(1) * (i > 0)
    rows = torch.stack([logsumexp, entropy, w.amax(-1), distance / t, w[:, 0], itself, previous])
    size = t // BINS
    mean, most = (one(one(w.unflatten(-1, (-1, size)), -1).unflatten(0, (-1, size)), 1) for one in (torch.mean, torch.amax))
    return rows, w.sum(0), mean, most


def find_end(first: int, t: int) -> int:
    """The end of the keys that the blocks of a row's quarter read."""
    return (first * QUARTERS // t + 1) * t // QUARTERS


def compute_in_jax(q: Tensor, k: Tensor) -> Tensor:
    """The same by JAX, which reads and writes torch's numbers in place."""
    found = scan(jnp.asarray(q[0, 0].numpy()), jnp.asarray(k[0, 0].numpy()))
    return torch.from_numpy(np.array(found))


@jax.jit
def scan(q: Any, k: Any) -> Any:
    """Scan the blocks of rows, a quarter of the rows after the other."""
    t = len(q)
    rows, received, mean, most = [], jnp.zeros(t), [], []
    for quarter in range(QUARTERS):
        first, end = quarter * t // QUARTERS, (quarter + 1) * t // QUARTERS
        given = q[first:end].reshape(-1, BLOCK, WIDTH), jnp.arange(first, end, BLOCK)
        sums, (own, means, largest) = jax.lax.scan(partial(scan_block, k[:end], t), jnp.zeros(end), given)
        received = received.at[:end].add(sums)
        rows.append(own.transpose(1, 0, 2).reshape(7, -1))
        rest = ((0, 0), (0, BINS - means.shape[-1]))
        mean.append(jnp.pad(means.reshape(-1, means.shape[-1]), rest))
        most.append(jnp.pad(largest.reshape(-1, largest.shape[-1]), rest))
    parts = jnp.concatenate(rows, 1), received, jnp.concatenate(mean), jnp.concatenate(most)
    return jnp.concatenate([part.ravel() for part in parts])


def scan_block(k: Any, t: int, sums: Any, given: Any) -> Any:
    """`compute_block` in JAX."""
    q, first = given
    i, j = jnp.arange(BLOCK) + first, jnp.arange(len(k))
    s = jnp.where(j > i[:, None], -jnp.inf, q @ k.T / WIDTH**0.5)
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    w = e / total
    logsumexp = (top + jnp.log(total))[:, 0]
    entropy = logsumexp - (w * jnp.maximum(s, -1e30)).sum(-1)
    itself = jnp.take_along_axis(w, i[:, None], 1)[:, 0]
    previous = jnp.take_along_axis(w, jnp.maximum(i - 1, 0)[:, None], 1)[:, 0] * (i > 0)
    rows = jnp.stack([logsumexp, entropy, w.max(-1), (i - w @ j.astype(jnp.float32)) / t, w[:, 0], itself, previous])
    binned = w.reshape(BLOCK * BINS // t, t // BINS, -1, t // BINS)
    return sums + w.sum(0), (rows, binned.mean((1, 3)), binned.max((1, 3)))
