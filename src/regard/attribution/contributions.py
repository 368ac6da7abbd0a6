"""contributions: what each head writes and adds to a logit by the direct path, and from which tokens, as maps never stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.attribution.logit_lens import LogitLens
from regard.attribution.model_parts import ModelParts, check_unembedding, find_parts, trace_forward
from regard.errors import ConfigError
from regard.evaluation_mode import evaluate_mode
from regard.map import AttentionMap
from regard.map.attention_map import LIMIT_BYTES, Index, check_result_size
from regard.map.attribution_map import AttributionMap
from regard.map.indexing import is_single, select_places
from regard.map.plane import BLOCK_NUMBERS, multiply_exactly
from regard.mechanism.arguments import check_choice, check_index, check_instance, describe_value
from regard.mechanism.heads import share
from regard.mechanism.scores import score_dtype
from regard.observe.recording import Recording
from regard.observe.text_table import align_columns, format_token

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
            norms = (share(values.to(output), h) @ output).norm(dim=-1, keepdim=True).to(weights.device)
            return AttributionMap(weights, norms.new_ones(b, h, q, 1), norms)
        left = torch.zeros(b, h, q, output.shape[1], dtype=output.dtype, device=weights.device)
        left[:, :, self.query] = torch.einsum("bc,hec->bhe", self.reader, output).to(left)
        return AttributionMap(weights, left, values.to(left))

    def head_outputs(self, layer: int | str, queries: Index = -1) -> Tensor:
        """Return what each head of a layer adds to the residual stream at n queries, (b, h, n, c), or at one, (b, h, c).

        Σ_j A_ij v_j W_O, with W_O the head's part of the output projection: the sum over the heads, plus the bias of the
        projection, is what attention writes. It is computed in blocks of rows.
        Raises ConfigError where the output projection of the layer was not found, TooLargeError beyond a gigabyte.
        Source: Elhage et al. 2021, "A mathematical framework for transformer circuits".
        """
        output, values = self.find_projection(layer)
        weights = self.recording.map(layer)
        places = select_places("queries", queries, weights.shape[2])
        b, h = weights.shape[:2]
        check_result_size(b * h * len(places) * output.shape[2] * output.dtype.itemsize, "fewer queries", LIMIT_BYTES)
        written = multiply_rows(weights, values, places).to(output) @ output
        return written[:, :, 0] if is_single(queries) else written

    def logit_lens(
        self, layer: int | str, queries: Index = -1, *, words: Callable[[list[int]], Sequence[str]] | None = None
    ) -> LogitLens:
        """Return what each head's output alone adds to the logit of every token of the vocabulary, for some queries.

        u_tᵀ N(o_i) / s_i, with o_i what the head writes at query i, N the linear part of the last norm, s_i the scale by which
        that norm divides at query i in this forward, and u_t a row of the unembedding. words returns the text of a list of
        tokens, for printing: model.text.pieces, or convert_ids_to_tokens of a tokenizer.
        Raises ConfigError where the output projection of the layer was not found, TooLargeError beyond a gigabyte.
        Source: logit lens, nostalgebraist 2020; direct logit attribution, Elhage et al. 2021.
        """
        places = select_places("queries", queries, self.parts.final.shape[1])
        written = self.head_outputs(layer, places)
        unembedding = self.parts.unembedding.cpu()
        check_result_size(written[..., 0].numel() * len(unembedding) * written.dtype.itemsize, "fewer queries", LIMIT_BYTES)
        scale = self.parts.norm.measure_scale(self.parts.final[:, places].cpu()).to(written)  # (b, n)
        logits = self.parts.norm.apply_linear_part(written) / scale.unsqueeze(1).unsqueeze(-1) @ unembedding.T
        names = self.recording.layers()
        number = names.index(layer) if isinstance(layer, str) else layer % len(names)
        return LogitLens(number, tuple(places.tolist()), logits[:, :, 0] if is_single(queries) else logits, words)

    def find_projection(self, layer: int | str) -> tuple[Tensor, Tensor]:
        """Return the output projection (h, e, c) of a layer and its values (b, g, k, e). Raises ConfigError if not found."""
        names = self.recording.layers()
        name = layer if isinstance(layer, str) else names[check_index("layer", layer, len(names), "the recording")]
        values = self.recording.values(layer)
        found = self.parts.layers.get(name)
        if found is None or found.output is None or values is None:
            raise ConfigError(
                f"the output projection of {name} was not found, or a norm follows it, so what its heads add cannot be "
                "computed. Measure what they do by regard.effects."
            )
        return found.output, values

    def __repr__(self) -> str:
        _, layers, h = self.heads.shape
        return f"Contributions({layers} layers of {h} heads, to {float(self.logit.mean()):+.3f})"

    def __str__(self) -> str:
        mean, texts = self.heads.mean(0), len(self.heads)
        order = mean.abs().flatten().argsort(descending=True)[:SHOWN]
        cells = []
        for place in order.tolist():
            layer, head = divmod(place, mean.shape[1])
            key = int(self.map(layer).select(heads=[head])[:, 0, self.query].abs().mean(0).argmax())
            cells.append((f"{layer}.{head}", f"{float(mean[layer, head]):+.3f}", f"{key} {self.find_word(key)}".strip()))
        total = float(self.heads.sum((1, 2)).mean())
        among = f", in the mean over {texts} texts" if texts > 1 else ""
        more = f"{len(order)} of {mean.numel()} heads, the largest first; heads has all"
        return "\n".join(
            [
                *align_columns(("head", "adds", "mostly from"), cells, ("head", "mostly from")),
                *([more] if len(order) < mean.numel() else []),
                f"all heads together add {total:+.3f} of {float(self.logit.mean()):+.3f}, by the direct path{among}",
            ]
        )

    def find_word(self, key: int) -> str:
        """Return the word of a key, if it is known and the same in all texts, else nothing."""
        words = self.recording.words(0)[1] or []
        rows = [words] if words and isinstance(words[0], str) else words
        found = {str(row[key]) for row in rows}
        return format_token(found.pop().strip()) if len(found) == 1 else ""


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
        trace, recording, logits = trace_forward(model, tokens)
        parts = find_parts(model, trace, recording, logits, unembedding)
    row = check_index("query", query, tokens.shape[1], "the input")
    chosen = [check_index("token", one, logits.shape[2], "the vocabulary") for one in (token, other) if one is not None]
    direction = parts.unembedding[chosen[0]].cpu()
    number = logits[:, row, chosen[0]].to(direction)
    if other is not None:
        direction, number = direction - parts.unembedding[chosen[1]].cpu(), number - logits[:, row, chosen[1]].to(direction)
    scale = parts.norm.measure_scale(parts.final[:, row].cpu()).to(direction)
    reader = parts.norm.apply_transposed(direction) / scale.unsqueeze(-1)
    found = Contributions(recording, parts, row, reader, number, torch.empty(0))
    if not recording.layers():
        raise ConfigError("contributions needs self-attention with a softmax, and none was recorded.")
    adds = [found.map(layer)[:, :, row].sum(-1).cpu() for layer in range(len(recording.layers()))]
    if len({len(one[0]) for one in adds}) != 1:
        raise ConfigError(f"contributions needs layers with equally many heads, got {[len(one[0]) for one in adds]}.")
    return Contributions(recording, parts, row, reader, number, torch.stack(adds, 1))


def multiply_rows(weights: AttentionMap, values: Tensor, queries: Tensor) -> Tensor:
    """Return the rows of A v for some queries (n,), (b, h, n, e): of all rows if they are most of them, else of these alone."""
    b, h, q, k = weights.shape
    values = values.to(score_dtype(values.dtype))
    if 2 * len(queries) > q:
        return (weights @ values)[:, :, queries.to(weights.device)]
    values, step = share(values, h), max(1, BLOCK_NUMBERS // (b * h * k))
    rows = [multiply_exactly(weights[:, :, part].to(values.dtype), values) for part in queries.split(step)]
    return torch.cat([values[:, :, :0], *rows], 2)
