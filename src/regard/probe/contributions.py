"""contributions: what each head adds to a logit by the direct path, and from which tokens, as maps that are never stored."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.mechanism.arguments import check_choice, check_index, check_instance, describe_value
from regard.mechanism.heads import share
from regard.observe.record import record
from regard.observe.recording import Recording
from regard.observe.text_table import align_columns, format_token
from regard.probe.evaluation_mode import evaluate_mode
from regard.probe.model_parts import ActivationTrace, ModelParts, check_unembedding, find_parts
from regard.probe.probe_heads import compute_logits

KINDS = ("direct", "carried")
SHOWN = 10  # heads that are printed


@dataclass(frozen=True, eq=False)
class Contributions:
    """What heads add to a logit, or to a difference of two, of one query, by the direct path to the unembedding.

    heads (b, layers, h) in logits; logit (b,) is the whole number, of which their sum is the part that attention adds directly.
    The scale of the last norm is that of this forward (frozen), so that all contributions add up.
    """

    recording: Recording
    parts: ModelParts
    query: int
    reader: Tensor  # (b, c): what a vector of the residual stream adds to the number is its product with this
    logit: Tensor
    heads: Tensor

    def map(self, layer: int | str, kind: str = "direct") -> AttributionMap:
        """Return what each key adds through each head of a layer, (b, h, q, k).

        kind "direct" is A_ij (d · v_j W_O), with d the direction of the number in the residual stream, through the linear part
        of the last norm; 0 for other queries. "carried" is A_ij ‖v_j W_O‖, how much each key writes, whatever the number.
        Raises ConfigError where the output projection of the layer was not found.
        Source: direct logit attribution, Elhage et al. 2021; norms, Kobayashi et al. 2020.
        """
        check_choice("kind", kind, KINDS)
        output, values = self.find_projection(layer)
        weights = self.recording.map(layer)
        b, h, q, _ = weights.shape
        if kind == "carried":
            norms = (share(values.float().cpu(), h) @ output).norm(dim=-1, keepdim=True).to(weights.device)
            return AttributionMap(weights, norms.new_ones(b, h, q, 1), norms)
        left = torch.zeros(b, h, q, output.shape[1], device=weights.device)
        left[:, :, self.query] = torch.einsum("bc,hec->bhe", self.reader, output).to(left)
        return AttributionMap(weights, left, values.to(left))

    def find_projection(self, layer: int | str) -> tuple[Tensor, Tensor]:
        """Return the output projection (h, e, c) of a layer and its values (b, g, k, e). Raises ConfigError if not found."""
        names = self.recording.layers()
        name = layer if isinstance(layer, str) else names[check_index("layer", layer, len(names), "the recording")]
        values = self.recording.values(layer)
        if self.parts.layers[name].output is None or values is None:
            raise ConfigError(f"the output projection of {name} was not found, or a norm follows it.")
        return self.parts.layers[name].output, values  # type: ignore[return-value]

    def __str__(self) -> str:
        mean = self.heads.mean(0)
        order = mean.abs().flatten().argsort(descending=True)[:SHOWN]
        cells, words = [], self.recording.words(0)[1]
        for place in order.tolist():
            layer, head = divmod(place, mean.shape[1])
            key = self.map(layer).select(batch=[0], heads=[head])[0, 0, self.query].abs().argmax()
            word = format_token(str(words[int(key)]).strip()) if words else ""
            cells.append((f"{layer}.{head}", f"{float(mean[layer, head]):+.3f}", f"{int(key)} {word}".strip()))
        total = float(self.heads.sum((1, 2)).mean())
        return "\n".join(
            [
                *align_columns(("head", "adds", "mostly from"), cells, ("head", "mostly from")),
                f"all heads together add {total:+.3f} of {float(self.logit.mean()):+.3f}, by the direct path",
            ]
        )


def contributions(
    model: nn.Module,
    tokens: Tensor,
    token: int,
    other: int | None = None,
    *,
    query: int = -1,
    unembedding: Tensor | None = None,
) -> Contributions:
    """Compute what each head adds to the logit of a token by the direct path, or to its lead over another token.

    tokens (b, t) are the model's input; query is the position whose logits are meant. The output projections, the last norm and
    the unembedding are found by running the model (see probe_heads); unembedding (n, c) is needed only where the model has no
    get_output_embeddings. What heads do through later layers is not part of it: regard.effects measures the whole.
    Raises ConfigError where the logits are not the last norm times the unembedding, OutOfRangeError for a token or query that
    does not exist.
    """
    check_instance("model", model, nn.Module, "Pass a language model that maps tokens (b, t) to logits.")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise ConfigError(f"tokens must be ids (b, t), got {describe_value(tokens)}.")
    check_unembedding(unembedding)
    with evaluate_mode(model), torch.no_grad():
        trace = ActivationTrace()
        with trace.watch(model), record(model, keep="values") as recording:
            logits = compute_logits(model, tokens)
        parts = find_parts(model, trace, recording, logits, unembedding)
    row = check_index("query", query, tokens.shape[1], "the input")
    chosen = [check_index("token", one, logits.shape[2], "the vocabulary") for one in (token, other) if one is not None]
    direction = parts.unembedding[chosen[0]].cpu()
    number = logits[:, row, chosen[0]].float().cpu()
    if other is not None:
        direction, number = direction - parts.unembedding[chosen[1]].cpu(), number - logits[:, row, chosen[1]].float().cpu()
    scale = parts.norm.measure_scale(parts.final[:, row].cpu()).float()
    reader = parts.norm.apply_transposed(direction) / scale.unsqueeze(-1)
    found = Contributions(recording, parts, row, reader, number, torch.empty(0))
    adds = [found.map(layer)[:, :, row].sum(-1).cpu() for layer in range(len(recording.layers()))]
    if len({len(one[0]) for one in adds}) != 1:
        raise ConfigError("contributions needs layers with equally many heads.")
    return Contributions(recording, parts, row, reader, number, torch.stack(adds, 1))
