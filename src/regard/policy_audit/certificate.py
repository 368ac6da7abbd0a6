"""The certificate of an audit: how far its numbers are from those of some rows that are computed anew in float64.

Nothing is shared with the passes that measured: complete rows of scores are a product, and masks are evaluated for each key.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.heads import share
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.scores import default_scale
from regard.policies import AttentionInputs, Policy
from regard.policy_audit.row_measures import RowMeasures

CERTIFIED_ROWS = 8  # rows of each head that are checked by default


@dataclass(frozen=True)
class AuditCertificate:
    """How exact an audit is: the largest differences from rows computed anew in float64, and how many rows that were.

    Differences of kl and output_error are relative where the number is above 1. wrong_counts is in how many rows another number
    of keys is kept. A row counts once for each policy; exact is whether these were all rows.
    """

    recall: float
    kl: float
    output_error: float
    wrong_counts: int
    rows: int
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What was checked, in a sentence."""
        rows = f"{'all ' if self.exact else ''}{self.rows:,} rows computed anew in float64"
        counts = f"{self.wrong_counts:,} keep another number of keys" if self.wrong_counts else "each keeps as many keys"
        return (
            f"certificate: of {rows}, {counts}; recall differs by at most {self.recall:.1e}, KL by {self.kl:.1e} and the error "
            f"of the output by {self.output_error:.1e}."
        )


def join_certificates(parts: Sequence[AuditCertificate]) -> AuditCertificate:
    """Join the certificates of several layers."""
    return AuditCertificate(
        recall=max(one.recall for one in parts),
        kl=max(one.kl for one in parts),
        output_error=max(one.output_error for one in parts),
        wrong_counts=sum(one.wrong_counts for one in parts),
        rows=sum(one.rows for one in parts),
        exact=all(one.exact for one in parts),
    )


def certify_layer(
    inputs: AttentionInputs, policies: Sequence[Policy], masks: Sequence[Mask], found: RowMeasures, rows: int
) -> AuditCertificate:
    """Compare what was measured of a layer with `rows` rows of each head, spread over its queries, the last one among them."""
    t, device = inputs.tokens, inputs.q.device
    count = min(rows, t)
    queries = (torch.arange(1, count + 1, device=device) * t // count) - 1
    values, seen = inputs.require_values("an audit").double(), find_visible(inputs.mask, inputs, queries)
    complete, wrong_counts, differences = weigh_rows(inputs, inputs.k, queries, seen), 0, torch.zeros(3, dtype=torch.float64)
    for n, (policy, mask) in enumerate(zip(policies, masks, strict=True)):
        kept = find_visible(mask, inputs, queries) & seen
        cache = policy.change_cache(inputs)
        if cache is None:
            expected = compare_kept_rows(complete, weigh_rows(inputs, inputs.k, queries, kept), kept, values)
        else:
            changed = weigh_rows(inputs, cache[0], queries, kept)
            expected = compare_changed_rows(complete, changed, values, cache[1].double(), queries < inputs.prompt)
        ours = (x[n][..., queries].double() for x in (found.recall, found.kl, found.output_error))
        largest = [((x - y).abs() / y.abs().clamp(min=1)).max() for x, y in zip(ours, expected, strict=True)]
        differences = torch.maximum(differences, torch.stack(largest).cpu())
        wrong_counts += int((found.kept[n][..., queries] != kept.sum(-1)).sum())
    checked = len(policies) * inputs.q.shape[0] * inputs.q.shape[1] * count
    recall, kl, output_error = differences.tolist()
    return AuditCertificate(recall, kl, output_error, wrong_counts, checked, count == t)


def find_visible(mask: Mask, inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Return which keys some queries see, (b, h, n, t)."""
    b, h, t, _ = inputs.q.shape
    return mask.block(queries, torch.arange(t, device=queries.device)).expand(b, h, len(queries), t)


def weigh_rows(inputs: AttentionInputs, k: Tensor, queries: Tensor, seen: Tensor) -> Tensor:
    """Compute the weights of some queries (n,) on keys k (b, g, t, d) and on the sink, (b, h, n, t + 1), in float64."""
    b, h, t, _ = inputs.q.shape
    scores = inputs.q[:, :, queries].double() @ share(k.double(), h).mT
    scores = scores * (default_scale(inputs.q) if inputs.scale is None else inputs.scale)
    if inputs.softcap is not None:
        scores = inputs.softcap * (scores / inputs.softcap).tanh()
    if inputs.bias is not None:
        scores = scores + inputs.bias.expand(b, h, t, t)[:, :, queries].double()
    sink = scores.new_full((b, h, len(queries), 1), -torch.inf)
    if inputs.sinks is not None:
        sink = sink.copy_(inputs.sinks.view(1, h, 1, 1))
    return torch.cat([scores.masked_fill(~seen, -torch.inf), sink], -1).softmax(-1)


def compare_kept_rows(complete: Tensor, partial: Tensor, kept: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return recall, KL(partial || complete) and the error of the output, (b, h, n), of rows of weights (b, h, n, t + 1)."""
    recall = (complete[..., :-1] * kept).sum(-1) + complete[..., -1]
    return recall, compute_divergence(partial, complete), compute_error(complete, values, partial, values)


def compare_changed_rows(
    complete: Tensor, changed: Tensor, values: Tensor, changed_values: Tensor, is_prompt: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ min(p, p'), KL(changed || complete) and the error of the output, (b, h, n); the prompt does not change."""
    common = torch.minimum(complete, changed).sum(-1).masked_fill(is_prompt, 1)
    divergence, error = compute_divergence(changed, complete), compute_error(complete, values, changed, changed_values)
    return common, divergence.masked_fill(is_prompt, 0), error.masked_fill(is_prompt, 0)


def compute_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) of distributions (..., n), nats."""
    return torch.where(p > 0, p * (p / q).log(), 0).sum(-1)


def compute_error(weights: Tensor, values: Tensor, other_weights: Tensor, other_values: Tensor) -> Tensor:
    """Compute `|o' - o| / |o|` of the outputs (b, h, n, e) of weights and of others; |o'| where o is 0."""
    h = weights.shape[1]
    context, other = (p[..., :-1] @ share(v, h) for p, v in ((weights, values), (other_weights, other_values)))
    size, change = context.norm(dim=-1), (other - context).norm(dim=-1)
    return torch.where(size > 0, change / size, change)
